"""Trainer of a TensorFlow replica: model, loss, optimizer and metrics; knows nothing of other replicas.

All methods are called while a `tf.function` is traced, within one replica, except the constructor, the
access to named state, and those whose docstring says "not traced".
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import keras
import tensorflow as tf

from isotrain.adapters.common.objective import Objective, frozen_specs
from isotrain.adapters.common.outputs import as_plain_tree
from isotrain.adapters.common.seeds import seed_offset
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras import weights as keras_weights
from isotrain.adapters.keras.batch_norm import normalize_ghost_batches, normalize_globally
from isotrain.adapters.keras.losses import Losses
from isotrain.adapters.keras.random_layers import draw_by_sample
from isotrain.adapters.keras.recompute import Recomputed
from isotrain.adapters.keras.standalone_generators import (
    UNSEEDED,
    standalone_generators,
    user_functions,
)
from isotrain.adapters.tensorflow.base import private_api
from isotrain.adapters.tensorflow.base.keras_trace_overrides import shifted_seeds
from isotrain.adapters.tensorflow.base.pass_costs import functions_inlined, pass_costs
from isotrain.adapters.tensorflow.base.private_api import copies
from isotrain.adapters.tensorflow.base.recompute import (
    operations,
    operations_since,
    recompute,
    recomputed,
)
from isotrain.adapters.tensorflow.base.require_all import require_all
from isotrain.adapters.tensorflow.base.variables import assign_all, flatten, undo_where, value_of
from isotrain.adapters.tensorflow.base.without_values import WithoutValues
from isotrain.adapters.tensorflow.base.xla import Compute, compiled
from isotrain.adapters.tensorflow.trainer.frozen_state import FrozenState
from isotrain.adapters.tensorflow.trainer.loss import forward, loss_computer
from isotrain.adapters.tensorflow.trainer.loss_weighting import SliceWeights, Total
from isotrain.adapters.tensorflow.trainer.metrics import MetricCollection
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients, WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import NamedState, canonical_names, native, sums
from isotrain.adapters.tensorflow.trainer.step_clock import StepClock
from isotrain.adapters.tensorflow.trainer.step_context import TensorFlowStepContext
from isotrain.adapters.tensorflow.trainer.weights import (
    carried_variables,
    layers_of,
    moving_statistics,
    per_replica_weights,
    require_precision,
    self_updating,
    weights_of,
)
from isotrain.plugin import (
    FrozenModel,
    PassCosts,
    Phase,
    SpecError,
    StateKind,
    StatePart,
    TrainingSpec,
)

MicroBatch = tuple[Any, Any]
"""Inputs and targets of one micro-batch."""


class ReplicaTrainer:
    """Model, loss, optimizer and metrics of the replicas of this process.

    Attributes:
        model: Model as the user's function built it.
        statistics: Moving statistics, weights that forward passes update; replicas must agree on them.
        others: Non-trainable weights, which `preserving_training_state` restores.
        state: Named state, for checkpoints.
        losses: Losses of the steps, by phase and output; empty with an objective.
        metrics: Metrics of training and evaluation.
        update: Optimizer and its state.
        step: Step context that objectives get.
        objective: The spec's objective; None where it has a loss.
        frozen_state: Watches what traces read and change of Python's state.
    """

    _watched: Sequence[tf.Variable] | None = None
    """The only weights that get gradients; None for all that are trainable."""

    def __init__(
        self,
        spec: TrainingSpec,
        scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Builds the model, the optimizer and the metrics.

        Args:
            spec: Training spec.
            scope: Scope of the `tf.distribute` strategy, in which variables are created.
        """
        keras_private.refuse_wrong_classes(require_all)
        tf.random.set_seed(spec.seed)
        self._frozen = {
            each.name: self._build_frozen(each, its_spec, scope)
            for each, its_spec in frozen_specs(spec)
        }
        tf.random.set_seed(spec.seed)  # the model draws as without frozen ones
        self.model = self._build_model(spec, scope)
        require_precision(self.model, spec.precision)
        with scope():
            self._take_model(spec)
            if not spec.updates:
                self._take_update(spec, self._trainable, self._others, scope)
                self.state = self._state_of(self._trainable, self._others, self._state_kinds())

    def _build_frozen(
        self,
        frozen: FrozenModel,
        spec: TrainingSpec,
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> Callable[..., Any]:
        """Builds a frozen model, called in evaluation mode."""
        model = built_model(spec, scope)
        if isinstance(model, keras.Layer):
            return keras_model.freeze_model(model, frozen)
        variables = [each for weights in weights_of(model, spec) for each in weights]
        named = dict(zip(canonical_names(variables), variables, strict=True))
        frozen.load(named, lambda variable, array: variable.assign(array))
        return forward(spec, model, training=False)

    def _build_model(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Any:
        model = built_model(spec, scope, recomputed)
        if isinstance(model, tf.Module):
            recompute(model, spec)
        return model

    def _take_model(self, spec: TrainingSpec) -> None:
        """Prepares the model for training."""
        self._trainable, self._others = weights_of(self.model, spec)
        others = self._others
        per_replica = per_replica_weights(self._trainable, others, spec)
        self._keras_statistics = moving_statistics(self.model, per_replica.values())
        self.statistics = [native(variable) for variable in self._keras_statistics]
        self._carried = carried_variables(self.model)
        self._carried |= {name: native(each) for name, each in per_replica.items()}
        updating = self_updating(self.model, others)
        self._self_updating = [*self._carried.values(), *map(native, updating)]
        generators = standalone_generators(spec, "tensorflow", self.model)
        self._default_generator = generators[UNSEEDED]
        self._generators = {name: generator.state for name, generator in generators.items()}
        seeds = [
            variable
            for variable in others
            if keras_private.is_seed(getattr(variable, "path", variable.name))
        ]
        tf_generators = private_api.generators_of(self.model)
        self._seeds = [*seeds, *self._generators.values()]
        self._tf_generators = tf_generators.values()
        self._generators |= tf_generators
        self._forward = forward(spec, self.model, training=False)
        keras_weights.lock_trainable(self.model)
        self._freezing = keras_weights.Freezing(self.model)
        self._changing_statistics = self.statistics

    def _take_update(
        self,
        spec: TrainingSpec,
        trainable: list[Any],
        others: list[Any],
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Builds what the weights to train are trained by.

        Args:
            spec: Training spec, or that of one of several updates.
            trainable: Weights to train.
            others: All other weights.
            scope: Scope of the `tf.distribute` strategy.
        """
        self._values = [native(variable) for variable in trainable]
        self.others = [native(variable) for variable in others]
        self.update = self._update_of(spec, trainable)
        self.step = TensorFlowStepContext(spec, self._frozen)
        self.objective = Objective.of(spec, "tensorflow", self.step)
        if spec.batch_norm == "global" and isinstance(self.model, keras.Layer):
            normalize_globally(keras_private.layers_of(self.model), self.step)
        if self.step.has_ghost_batches and isinstance(self.model, keras.Layer):
            normalize_ghost_batches(keras_private.layers_of(self.model), self.step)
        if spec.random_layers == "per-sample":
            draw_by_sample()
        if spec.compile and self.objective and self.objective.step:
            raise SpecError(
                "compile: XLA compiles no collectives, and the objective takes the step, which has them."
                " Leave compile out."
            )
        training, evaluation = (
            self._loss_computer(spec, is_training) for is_training in (True, False)
        )
        self._compute: dict[bool, Compute] = {
            True: self.step.drawing(training),
            False: self.step.drawing(evaluation),
        }
        if spec.compile:
            self._compute = {
                is_training: compiled(compute) for is_training, compute in self._compute.items()
            }
        self.losses: dict[Phase, Losses] = {
            "train": training.losses,
            "evaluation": evaluation.losses,
        }
        self.metrics = MetricCollection(spec, self.model, self.losses, scope, self.objective)
        self.frozen_state = FrozenState(
            layers_of(self.model), [*user_functions(spec, "tensorflow")]
        )

    def _loss_computer(self, spec: TrainingSpec, training: bool) -> keras_model.LossComputer:
        """Makes the function from inputs and targets to loss and predictions."""
        return loss_computer(spec, self.model, training, self.objective)

    def _state_kinds(self) -> dict[StateKind, Callable[[], Mapping[str, Any]]]:
        """Variables by name of each kind of state besides weights."""
        return {
            "optimizer": self.update.slots,
            "loss-scale": self.update.loss_scale,
            "random": lambda: self._generators,
            "metrics": lambda: sums(self.metrics.shown),
            "carry": lambda: self._carried,
        }

    def for_updates(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> dict[str, Self]:
        """Trainers of this model for the named updates of the spec, by name; not traced."""
        names = canonical_names([*self._trainable, *self._others])[: len(self._trainable)]
        weights = dict(zip(names, self._trainable, strict=True))
        state = NamedState(self._trainable, self._others, {})
        trainers = {}
        for update, trained in spec.weights_by_update(names).items():
            trainer = trainers[update] = copy.copy(self)
            frozen = [each for name, each in weights.items() if name not in trained]
            with scope():
                trainer._take_update(
                    spec.for_update(update),
                    [weights[name] for name in trained],
                    [*frozen, *self._others],
                    scope,
                )
            trainer._watched = trainer._values
            trainer.step.draw_for(update)
            trainer.state = state.for_update(trained, trainer._state_kinds())
        return trainers

    def set_frozen(self, names: Collection[str]) -> None:
        """Freezes exactly these weights within the run, as `FreezingGroup.set_frozen`; not traced."""
        if isinstance(self.model, keras.Layer):
            self._freezing.set_frozen(names)
            changing = {id(native(each)) for each in keras_weights.moving_statistics(self.model)}
            self._changing_statistics = [e for e in self.statistics if id(e) in changing]
        weights = canonical_names([*self._trainable, *self._others])[: len(self._trainable)]
        self.update.frozen = frozenset(i for i, name in enumerate(weights) if name in names)
        self._watched = None
        if self.update.frozen:
            pairs = zip(weights, self._values, strict=True)
            self._watched = [value for name, value in pairs if name not in names]

    def record_generator_states(self) -> None:
        """Records the states of random generators at the start of training, for `reseed`; not traced."""
        self._initial_seeds = _initial_values(self._seeds)
        self._initial_generators = _initial_values(self._tf_generators)

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
        """State that steps of a tf.Module may depend on and that no variable holds, a line each."""
        if isinstance(self.model, keras.Layer):
            return []
        return [
            "random numbers that a tf.Module draws by tf.random or tf.nn.dropout: TensorFlow keeps their"
            " counter where it cannot be read; a tf.random.Generator that the module holds is restored"
        ]

    def contribution(
        self,
        micro_batches: Sequence[MicroBatch],
        weights: tf.Tensor | None,
        has_placeholders: bool,
        total: Total,
        local: bool = False,
        take: Callable[[Gradients], Gradients] = list,
        clock: StepClock | None = None,
    ) -> tuple[tf.Tensor, Gradients]:
        """Computes a replica's weighted loss and its gradients.

        Args:
            micro_batches: The replica's micro-batches.
            weights: Weight of each micro-batch, shape `[micro_batches]`; None when all are 1.
            has_placeholders: Whether a micro-batch may be a placeholder, which has weight 0.
            total: Sums a tensor over all replicas.
            local: Whether the gradients are those of this replica's own mean.
            take: Transforms the gradients of each micro-batch before they are accumulated.
            clock: Clock that notes when the loss of a single micro-batch is computed.

        Returns:
            The sum over the micro-batches of weight * mean loss, a scalar; and its gradients (of the scaled
            loss, where the precision needs loss scaling).
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
            previous = [] if loss is None else [loss, *(g for g in sums if g is not None)]
            with (
                tf.control_dependencies(previous),
                self.undo_placeholder(has_placeholders, weight, "train"),
            ):
                self.step.set_slice(index, weight, has_placeholders)
                weighted_loss, gradients = self._forward_and_backward(
                    micro_batch, slice_weights, index, clock if len(micro_batches) == 1 else None
                )
                gradients = take(gradients)
                loss = weighted_loss if loss is None else loss + weighted_loss
                sums = gradients if not sums else list(map(_add, sums, gradients))
        assert loss is not None
        return loss, sums

    def has_own_denominator(self, micro_batch: MicroBatch) -> bool:
        """Whether the loss of such micro-batches is normalized by more than the number of targets."""
        self.step.set_slice(0, None, False)
        return bool(self._compute[False](*micro_batch)[0].shape.rank)

    def make_metrics(self, micro_batch: MicroBatch) -> None:
        """Runs a forward pass, so that training metrics create the variables they create lazily."""
        self.step.set_slice(0, None, False)
        self.metrics.update("train", micro_batch[1], self._compute[True](*micro_batch)[1])

    def loss_denominators(
        self, micro_batches: Sequence[MicroBatch], weights: tf.Tensor
    ) -> tf.Tensor:
        """Denominators of losses with such, and weights: float64, shape `[micro_batches, losses + 1]`.

        Args:
            micro_batches: The replica's micro-batches.
            weights: Weight of each, shape `[micro_batches]`; 0 for a placeholder, whose denominators are 0.
        """
        rows = []
        for index, micro_batch in enumerate(micro_batches):
            self.step.set_slice(index, weights[index], True)
            rows.append(tf.cast(self._loss_denominators(micro_batch), tf.float64))
        column = weights[:, tf.newaxis]
        return tf.concat([tf.stack(rows) * tf.cast(column > 0, tf.float64), column], 1)

    def part_sums(
        self,
        micro_batches: Sequence[MicroBatch],
        weights: tf.Tensor,
        has_placeholders: bool,
        totals: tf.Tensor,
        moves: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Computes what a micro-batch adds to the sums of a step, as `OrderedSumsGroup.part_sums`.

        Args:
            micro_batches: The micro-batch, a sequence of one.
            weights: Its fraction of the global batch, shape `[1]`.
            has_placeholders: Whether it may be a placeholder, which has weight 0.
            totals: Sums of `loss_denominators` over all micro-batches, `[losses + 1]`, where losses have any.
            moves: Whether counters and seeds move on, a scalar.

        Returns:
            Gradients, loss, weighted moving statistics, and sums of metrics, of any shapes.
        """
        changing = self._changing_statistics
        statistics = set(map(id, changing))
        counters = [each for each in self._self_updating if id(each) not in statistics]
        with (
            undo_where(tf.constant(True), changing),
            undo_where(tf.logical_not(moves), counters),
            self.metrics.measuring("train") as sums,
        ):
            loss, gradients = self.contribution(
                micro_batches, weights, has_placeholders, lambda _: totals
            )
            weighted = self.weighted_statistics(weights[0])
        return [*self.update.unscaled(gradients), loss, *weighted, *sums]

    def add_part_sums(self, phase: Phase, sums: Sequence[tf.Tensor], is_counted: bool) -> None:
        """Sets moving statistics and adds sums to metrics, as `OrderedSumsGroup.add_part_sums`.

        Args:
            phase: Phase of the metrics.
            sums: Sums of what follows the loss in `part_sums`, or of an evaluation's losses and metrics.
            is_counted: Whether the metrics of this replica get the sums.
        """
        count = len(self._changing_statistics) if phase == "train" else 0
        self.agree_on_statistics(sums[:count])
        if is_counted:
            self.metrics.add_sums(phase, sums[count:])

    def _loss_denominators(self, micro_batch: MicroBatch) -> tf.Tensor:
        """Denominators of a micro-batch's losses, shape `[losses]`; changes no state.

        No variable of a Keras model is assigned to, not even its old value: others may train it meanwhile.
        """
        is_keras = isinstance(self.model, keras.Layer)
        statistics = [] if is_keras else self.statistics
        undo = undo_where(tf.constant(True), [*self._carried.values(), *statistics])
        with undo, keras.StatelessScope() if is_keras else contextlib.nullcontext():
            return self._compute[False](*micro_batch)[0][1, 1:]

    def stateless_contribution(
        self, micro_batches: Sequence[MicroBatch], weights: tf.Tensor, shift: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Contribution, as by `contribution`, of a Keras model, without assignments: for workers.

        Args:
            micro_batches: Micro-batches, none of them a placeholder.
            weights: Weight of each micro-batch, shape `[micro_batches]`.
            shift: Offset of the seeds of random layers, shape `[2]`, int64.

        Returns:
            The loss, a scalar; gradients followed by changes of the moving statistics, in one vector of the
            weights' dtype; and the sums of the training metrics, a float64 vector.
        """
        self.step.refuse_workers()
        metrics = self.metrics.variables("train")
        with keras.StatelessScope() as scope, shifted_seeds(lambda: shift):
            for variable in metrics:
                scope.add_update((variable, tf.zeros(variable.shape, native(variable).dtype)))
            loss, gradients = self.contribution(
                micro_batches, weights, has_placeholders=False, total=tf.identity
            )
            current = [scope.get_current_value(variable) for variable in self._keras_statistics]
            sums = [scope.get_current_value(variable) for variable in metrics]
        changes = [
            tf.zeros_like(statistic) if after_value is None else after_value - value_of(statistic)
            for after_value, statistic in zip(current, self.statistics, strict=True)
        ]
        return (
            loss,
            flatten([*self.update.unscaled(gradients), *changes], self._values[0].dtype),
            flatten([tf.zeros(0, tf.float64), *sums], tf.float64),
        )

    def pass_costs(self, micro_batch: MicroBatch) -> PassCosts | None:
        """Costs of the passes of a micro-batch, by the operations of their graph; None if unknown."""
        before = operations()
        self.step.set_slice(0, None, False)
        with functions_inlined():
            loss, gradients, _ = self._passes(micro_batch, SliceWeights(None, list, tf.identity), 0)
        present = [each for each in gradients if each is not None]
        return pass_costs(operations_since(before), loss, present)

    def _forward_and_backward(
        self,
        micro_batch: MicroBatch,
        slice_weights: SliceWeights,
        index: int,
        clock: StepClock | None = None,
    ) -> tuple[tf.Tensor, Gradients]:
        """Weighted loss of a micro-batch, a scalar, and dense gradients of the weights' shapes. Local."""
        loss, gradients, predictions = self._passes(micro_batch, slice_weights, index, clock)
        self.metrics.update("train", micro_batch[1], predictions)
        return loss, gradients

    def _passes(
        self,
        micro_batch: MicroBatch,
        slice_weights: SliceWeights,
        index: int,
        clock: StepClock | None = None,
    ) -> tuple[tf.Tensor, Gradients, Any]:
        """Weighted loss and gradients, as `_forward_and_backward`, and predictions; no metric is updated."""
        watched = self._watched
        with tf.GradientTape(watch_accessed_variables=watched is None) as tape:
            if watched is not None:
                tape.watch(watched)
            loss, predictions = self._compute[True](*micro_batch)
            loss, weighted_loss = slice_weights.of(index, loss)
            scaled = self.update.scaled(loss)
            if clock is not None:
                scaled = clock.mark_loss(scaled)
        gradients = tape.gradient(scaled, self._values)
        return weighted_loss, list(map(_dense, gradients, self._values)), predictions

    @contextlib.contextmanager
    def undo_placeholder(
        self, has_placeholders: bool, weight: tf.Tensor | None, phase: Phase
    ) -> Iterator[None]:
        """Context that undoes a placeholder's effect on moving statistics and metrics.

        Seeds move on, as they do on the replicas that have samples.

        Args:
            has_placeholders: Whether the micro-batch may be a placeholder; otherwise nothing is traced.
            weight: Weight of the micro-batch, a scalar; 0 for a placeholder.
            phase: Phase whose metrics are updated.
        """
        if not has_placeholders:
            yield
            return
        assert weight is not None
        carried = self._carried.values()
        updated = [*self.statistics, *carried, *self.metrics.accumulators(phase)]
        with undo_where(tf.equal(weight, 0), updated):
            yield

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        """Context that restores the non-trainable state and the training metrics; not traced."""
        updated = (*self.others, *self._carried.values(), *self.metrics.accumulators("train"))
        with self._restoring(updated):
            yield

    def preserving_state(self) -> contextlib.AbstractContextManager[None]:
        """Context that restores the state that the model itself updates; not traced."""
        return self._restoring(self._self_updating)

    @contextlib.contextmanager
    def _restoring(self, updated: Iterable[tf.Variable]) -> Iterator[None]:
        """Context that restores these variables, of any shape, and the states of random generators."""
        generators = map(native, self._generators.values())
        variables = [copy for variable in (*updated, *generators) for copy in copies(variable)]
        values = [tf.identity(variable) for variable in variables]
        try:
            yield
        finally:
            assign_all(variables, values)

    def reseed(self, replica: int, step: int, local_replica: int) -> None:
        """Draws from here on what a replica draws in a step, whatever was drawn before; not traced.

        Args:
            replica: Index of the replica whose random numbers to draw.
            step: Step of the run.
            local_replica: Index of the local replica, by which Keras' seeds are offset on use.
        """
        shift = seed_offset(replica, step)
        for seed, initial in self._initial_seeds:
            seed.assign([initial[0] + shift - seed_offset(local_replica), *initial[1:]])
        for key, initial in self._initial_generators:
            key.assign([*initial[:-1], (initial[-1] + shift) % 2**63])

    def use_default_generator(self) -> None:
        """Makes this thread, where a replica is traced, draw by the generator that is part of the state."""
        keras_private.set_default_generator(self._default_generator)

    def average_parameters(self, mean: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        """Replaces the trainable weights by the results of `mean`, of their shapes and dtypes."""
        assign_all(self._values, mean([value_of(value) for value in self._values]))

    def part(self, name: StatePart) -> list[tf.Variable]:
        """Variables of a part of the state, of any shape, as strategies read and write them."""
        if name == "trainable":
            return self._values
        if name == "statistics":
            return self.statistics
        if name == "changing-statistics":
            return self._changing_statistics
        variables = self.update.variables
        return [
            variable for variable in variables if variable.dtype.is_floating and variable.shape.rank
        ]

    def weighted_statistics(self, weight: tf.Tensor | None) -> list[tf.Tensor]:
        """Changing statistics times this replica's weight (a scalar; None for 1), for the mean of all."""
        values = [value_of(variable) for variable in self._changing_statistics]
        if weight is None:
            return values
        return [value * tf.cast(weight, value.dtype) for value in values]

    def agree_on_statistics(self, values: Sequence[tf.Tensor]) -> None:
        """Assigns the moving statistics that steps change, values of their shapes and dtypes."""
        assign_all(self._changing_statistics[: len(values)], values)

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], counts: tf.Tensor, has_placeholders: bool
    ) -> None:
        """Adds micro-batches to this replica's evaluation metrics.

        Args:
            micro_batches: The replica's micro-batches.
            counts: Number of samples in each, shape `[micro_batches]`, float64; 0 for a placeholder.
            has_placeholders: Whether a micro-batch may be a placeholder.
        """
        for index, micro_batch in enumerate(micro_batches):
            count = counts[index]
            with self.undo_placeholder(has_placeholders, count, "evaluation"):
                self.step.set_slice(index, count, has_placeholders, "evaluation")
                loss, predictions = self._compute[False](*micro_batch)
                self.metrics.update("evaluation", micro_batch[1], predictions)
            self.metrics.add_loss(loss, count)

    def predict(self, inputs: Any) -> Any:
        """The model's outputs in evaluation mode."""
        return as_plain_tree(self._forward(inputs))


def built_model(
    spec: TrainingSpec,
    scope: Callable[[], contextlib.AbstractContextManager[Any]],
    recompute_by: Recomputed = keras.remat,
) -> Any:
    """The model of a spec; its large weights lack values in the context `WithoutValues`."""
    without_values = WithoutValues.entered

    def create() -> contextlib.AbstractContextManager[Any]:
        if without_values is not None:
            without_values.create_variables()
        return scope()

    return keras_model.build_model(
        spec, "tensorflow", create, recompute_by, has_values=without_values is None
    )


def _dense(gradient: Any, weight: tf.Variable) -> tf.Tensor | None:
    """A gradient as a dense tensor of its weight's shape.

    Adam and similar optimizers mishandle sparse gradients in which an index occurs twice. Where inputs may
    have any length, TensorFlow does not know the shape, by which all replicas cut gradients into buckets.
    """
    if gradient is None:
        return None
    tensor = tf.convert_to_tensor(gradient)
    tensor.set_shape(weight.shape)
    return tensor


def _initial_values(states: Iterable[Any]) -> list[tuple[tf.Variable, list[int]]]:
    """Pairs of a generator's state (a vector of integers) and its current value as a list."""
    return [(each, copies(each)[0].value().numpy().tolist()) for each in map(native, states)]


def _add(total: tf.Tensor | None, term: tf.Tensor | None) -> tf.Tensor | None:
    """Sum of two tensors of one shape; the other where one is None."""
    if total is None or term is None:
        return term if total is None else total
    return total + term
