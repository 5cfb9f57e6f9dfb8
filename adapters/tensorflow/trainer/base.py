"""One TensorFlow replica: its model, loss, optimizer and metrics; knows nothing of other replicas.

Everything here is called while a `tf.function` is traced, within one replica, except the constructor
and the access to named state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.outputs import as_plain_tree
from isotrain.adapters.common.seeds import seed_offset
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.losses import Losses
from isotrain.adapters.keras.rng import UNSEEDED, standalone_generators
from isotrain.adapters.tensorflow.base import private_api
from isotrain.adapters.tensorflow.base.compile import Compute, compiled
from isotrain.adapters.tensorflow.base.keras_tracing import shifted_seeds
from isotrain.adapters.tensorflow.base.private_api import copies
from isotrain.adapters.tensorflow.base.recompute import recompute, recomputed
from isotrain.adapters.tensorflow.base.variables import assign_all, flatten, undo_where, value_of
from isotrain.adapters.tensorflow.trainer.loss import forward, loss_computer
from isotrain.adapters.tensorflow.trainer.loss_weighting import SliceWeights, Total
from isotrain.adapters.tensorflow.trainer.metrics import MetricCollection
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients, WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import NamedState, native, sums
from isotrain.adapters.tensorflow.trainer.weights import (
    carried_variables,
    moving_statistics,
    require_precision,
    self_updating,
    weights_of,
)
from isotrain.plugin import Phase, StateKind, StatePart, TrainingSpec

MicroBatch = tuple[Any, Any]
"""The inputs and the targets of one slice."""


class ReplicaTrainer:
    """Model, loss, optimizer and metrics of the replicas of this process.

    Attributes:
        model: The model as the person's function built it.
        statistics: The weights that forward passes move; replicas must agree on them.
        others: The weights that are not trained, which `preserving_training_state` gives back.
        state: Its named state.
        losses: That its steps compute, by output; none where an objective gives them.
        metrics: What it measures while it trains and is evaluated.
        update: How its weights are updated.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Builds everything.

        Args:
            spec: What to train.
            scope: The scope of the `tf.distribute` strategy, in which variables are created.
        """
        tf.random.set_seed(spec.seed)
        self.model = self._build_model(spec, scope)
        require_precision(self.model, spec.precision)
        with scope():
            self._build_around_model(spec, scope)

    def _build_model(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Any:
        model = keras_model.build_model(spec, "tensorflow", scope, recomputed)
        if isinstance(model, tf.Module):
            recompute(model, spec)
        return model

    def _build_around_model(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        trainable, others = weights_of(self.model, spec)
        self._values = [native(variable) for variable in trainable]
        self.others = [native(variable) for variable in others]
        self._moved = moving_statistics(self.model)
        self.statistics = [native(variable) for variable in self._moved]
        self._carried = carried_variables(self.model)
        self._own = [*self._carried.values(), *map(native, self_updating(self.model, others))]
        self.update = self._update_of(spec, trainable)
        apart = standalone_generators(spec, "tensorflow", self.model)
        self._unseeded = apart[UNSEEDED]
        self._generators = {name: generator.state for name, generator in apart.items()}
        seeds = [v for v in others if keras_private.is_seed(getattr(v, "path", v.name))]
        keyed = private_api.generators_of(self.model)
        self._seeds, self._keyed = [*seeds, *self._generators.values()], keyed.values()
        self._generators |= keyed
        self.state = self._state_of(
            trainable,
            others,
            {
                "optimizer": self.update.slots,
                "loss-scale": self.update.loss_scale,
                "random": lambda: self._generators,
                "metrics": lambda: sums(self.metrics.shown),
                "carry": lambda: self._carried,
            },
        )
        self._forward = forward(self.model, training=False)
        training, evaluation = (loss_computer(spec, self.model, is_so) for is_so in (True, False))
        self._compute: dict[bool, Compute] = {True: training, False: evaluation}
        if spec.compile:
            self._compute = {is_so: compiled(each) for is_so, each in self._compute.items()}
        self.losses: dict[Phase, Losses] = {
            "train": training.losses,
            "evaluation": evaluation.losses,
        }
        self.metrics = MetricCollection(spec, self.model, self.losses, scope)
        keras_model.lock_trainable(self.model)

    def note_generators(self) -> None:
        """Notes the states of generators, for `reseed`; once they are those that training begins with."""
        self._first_seeds = _as_they_are(self._seeds)
        self._first_keys = _as_they_are(self._keyed)

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> WeightUpdate:
        return WeightUpdate(spec, trainable)

    def _state_of(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
    ) -> NamedState:
        return NamedState(trainable, others, kinds)

    def not_checkpointed(self) -> list[str]:
        """What steps of a tf.Module may depend on, and no variable holds."""
        if isinstance(self.model, keras.Layer):
            return []
        return [
            "what a tf.Module draws by tf.random or tf.nn.dropout: TensorFlow counts it where nobody can read"
            " it; a tf.random.Generator that the module holds is carried over"
        ]

    def contribution(
        self,
        micro_batches: Sequence[MicroBatch],
        weights: tf.Tensor | None,
        holes: bool,
        total: Total,
        local: bool = False,
        take: Callable[[Gradients], Gradients] = list,
    ) -> tuple[tf.Tensor, Gradients]:
        """Computes a replica's share of the loss and its gradients.

        Args:
            micro_batches: The replica's slices, one after the other.
            weights: The weight of each, shape `[micro_batches]`; None when all are 1.
            holes: Whether a slice may be a placeholder, which is one of weight 0.
            total: Sums a tensor over all replicas.
            local: Whether the gradients are to be those of this replica's own mean.
            take: What becomes of the gradients of each slice before they are added up.

        Returns:
            The sum over the slices of weight * mean loss, and its gradients (of the scaled loss,
            where the precision needs loss scaling).
        """
        slice_weights = SliceWeights(
            weights,
            lambda: [self._loss_denominators(micro_batch) for micro_batch in micro_batches],
            total,
            local,
        )
        loss: tf.Tensor | None = None
        sums: Gradients = []
        for index, micro_batch in enumerate(micro_batches):
            weight = None if weights is None else weights[index]
            before = [] if loss is None else [loss, *(g for g in sums if g is not None)]
            with tf.control_dependencies(before), self.kept_where(holes, weight, "train"):
                share, gradients = self._forward_and_backward(micro_batch, slice_weights, index)
                gradients = take(gradients)
                loss = share if loss is None else loss + share
                sums = gradients if not sums else list(map(_add, sums, gradients))
        assert loss is not None
        return loss, sums

    def has_own_denominator(self, micro_batch: MicroBatch) -> bool:
        """Whether the loss of such slices counts targets by more than their number."""
        return bool(self._compute[False](*micro_batch)[0].shape.rank)

    def make_metrics(self, micro_batch: MicroBatch) -> None:
        """Has training metrics make the variables that they make when they see a slice; without gradients."""
        self.metrics.update("train", micro_batch[1], self._compute[True](*micro_batch)[1])

    def _loss_denominators(self, micro_batch: MicroBatch) -> tf.Tensor:
        """What the losses that do not count all targets alike count by in a slice; nothing moves.

        For a Keras model no variable is assigned to, not even what it has: others may train it meanwhile.
        """
        is_keras = isinstance(self.model, keras.Layer)
        moved = list(self._carried.values()) if is_keras else self.statistics
        undone = undo_where(tf.constant(True), moved)
        with undone, keras.StatelessScope() if is_keras else contextlib.nullcontext():
            return self._compute[False](*micro_batch)[0][1, 1:]

    def stateless_contribution(
        self, micro_batches: Sequence[MicroBatch], weights: tf.Tensor, shift: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As `contribution` for a Keras model, but assigns to no variable: it may be traced for others.

        Args:
            micro_batches: The slices, none a placeholder.
            weights: Of each.
            shift: What the seeds of random layers are moved by, shape `[2]`.

        Returns:
            The loss; gradients and then changes of the moving statistics in one vector; and the sums of
            the training metrics over these slices.
        """
        metrics = self.metrics.variables("train")
        with keras.StatelessScope() as scope, shifted_seeds(lambda: shift):
            for variable in metrics:
                scope.add_update((variable, tf.zeros(variable.shape, native(variable).dtype)))
            loss, gradients = self.contribution(
                micro_batches, weights, holes=False, total=tf.identity
            )
            after = [scope.get_current_value(variable) for variable in self._moved]
            sums = [scope.get_current_value(variable) for variable in metrics]
        changes = [
            tf.zeros_like(before) if now is None else now - value_of(before)
            for now, before in zip(after, self.statistics, strict=True)
        ]
        return (
            loss,
            flatten([*self.update.unscaled(gradients), *changes], self._values[0].dtype),
            flatten([tf.zeros(0, tf.float64), *sums], tf.float64),
        )

    def _forward_and_backward(
        self, micro_batch: MicroBatch, slice_weights: SliceWeights, index: int
    ) -> tuple[tf.Tensor, Gradients]:
        with tf.GradientTape() as tape:
            loss, predictions = self._compute[True](*micro_batch)
            loss, share = slice_weights.of(index, loss)
            scaled = self.update.scaled(loss)
        gradients = tape.gradient(scaled, self._values)
        self.metrics.update("train", micro_batch[1], predictions)
        # Adam and its kin treat the rows of a sparse gradient wrongly where an index occurs twice.
        return share, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    @contextlib.contextmanager
    def kept_where(self, holes: bool, weight: tf.Tensor | None, phase: Phase) -> Iterator[None]:
        """Undoes what a placeholder slice did to the moving statistics and metrics.

        Seeds move on, as they do on the replicas that have samples.
        """
        if not holes:
            yield
            return
        assert weight is not None
        carried = self._carried.values()
        moved = [*self.statistics, *carried, *self.metrics.accumulators(phase)]
        with undo_where(tf.equal(weight, 0), moved):
            yield

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        """Gives the non-trainable state and the training metrics back their values; not traced."""
        moved = (*self.others, *self._carried.values(), *self.metrics.accumulators("train"))
        with self._given_back(moved):
            yield

    def preserving_state(self) -> contextlib.AbstractContextManager[None]:
        """Gives what the model itself moves back its values; not traced."""
        return self._given_back(self._own)

    @contextlib.contextmanager
    def _given_back(self, moved: Iterable[tf.Variable]) -> Iterator[None]:
        """Gives variables, and generators of random numbers, back their values."""
        generators = map(native, self._generators.values())
        variables = [c for variable in (*moved, *generators) for c in copies(variable)]
        before = [tf.identity(variable) for variable in variables]
        try:
            yield
        finally:
            assign_all(variables, before)

    def reseed(self, replica: int, step: int, own: int) -> None:
        """Draws from here on what a replica draws in a step, whatever was drawn before; not traced.

        Args:
            replica: Which.
            step: Of the run.
            own: The replica here, by which Keras' seeds are moved where they are drawn with.
        """
        shift = seed_offset(replica, step)
        for seed, first in self._first_seeds:
            seed.assign([first[0] + shift - seed_offset(own), *first[1:]])
        for key, first in self._first_keys:
            key.assign([*first[:-1], (first[-1] + shift) % 2**63])

    def use_default_generator(self) -> None:
        """Lets this thread, where a replica is traced, draw by the generator that is part of the state."""
        keras_private.set_default_generator(self._unseeded)

    def average_parameters(self, mean: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        """Replaces every trainable weight by what `mean` makes of it."""
        assign_all(self._values, mean([value_of(value) for value in self._values]))

    def part(self, name: StatePart) -> list[tf.Variable]:
        """The variables of a part of the state, as strategies read and write them."""
        if name == "trainable":
            return self._values
        if name == "statistics":
            return self.statistics
        slots = self.update.variables
        return [slot for slot in slots if slot.dtype.is_floating and slot.shape.rank]

    def weighted_statistics(self, weight: tf.Tensor | None) -> list[tf.Tensor]:
        """The moving statistics times this replica's weight: their mean is the value to agree on."""
        values = [value_of(variable) for variable in self.statistics]
        if weight is None:
            return values
        return [value * tf.cast(weight, value.dtype) for value in values]

    def agree_on_statistics(self, values: Sequence[tf.Tensor]) -> None:
        """Sets the moving statistics."""
        assign_all(self.statistics, values)

    def evaluate(self, micro_batches: Sequence[MicroBatch], counts: tf.Tensor, holes: bool) -> None:
        """Adds slices to this replica's evaluation accumulators; `counts` has shape `[micro_batches]`."""
        for index, micro_batch in enumerate(micro_batches):
            count = counts[index]
            with self.kept_where(holes, count, "evaluation"):
                loss, predictions = self._compute[False](*micro_batch)
                self.metrics.update("evaluation", micro_batch[1], predictions)
            self.metrics.add_loss(loss, count)

    def predict(self, inputs: Any) -> Any:
        """What the model gives in evaluation mode."""
        return as_plain_tree(self._forward(inputs))


def _as_they_are(states: Iterable[Any]) -> list[tuple[tf.Variable, list[int]]]:
    """The states of generators, and what they are now."""
    return [(each, copies(each)[0].value().numpy().tolist()) for each in map(native, states)]


def _add(total: tf.Tensor | None, term: tf.Tensor | None) -> tf.Tensor | None:
    if total is None or term is None:
        return term if total is None else total
    return total + term
