"""One TensorFlow replica: its model, loss, optimizer and metrics; knows nothing of other replicas.

Everything here is called while a `tf.function` is traced, within one replica, except the constructor
and the access to named state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters import keras_losses, keras_private, portable
from isotrain.adapters.keras_generators import UNSEEDED, generators_apart
from isotrain.adapters.outputs import Outputs
from isotrain.adapters.tensorflow import private
from isotrain.adapters.tensorflow.compiling import Compute, compiled
from isotrain.adapters.tensorflow.keras_tracing import moved_seeds
from isotrain.adapters.tensorflow.loss import evaluated_rows, forward, loss_computer
from isotrain.adapters.tensorflow.private import copies
from isotrain.adapters.tensorflow.recompute import recompute, recomputed
from isotrain.adapters.tensorflow.shares import Shares, Total
from isotrain.adapters.tensorflow.state import NamedState, native, slots, sums
from isotrain.adapters.tensorflow.variables import assign_all, joined, undone_where, value_of
from isotrain.adapters.tensorflow.weights import moving_statistics, require_precision, weights_of
from isotrain.plugin import Phase, StatePart, TrainingSpec

Piece = tuple[Any, Any]
"""The inputs and the targets of one slice."""

Gradients = list[tf.Tensor | None]
"""One per trainable weight; None where the loss does not depend on it."""


class Program:
    """Model, loss, optimizer and metrics of the replicas of this process.

    Attributes:
        model: The model as the person's function built it.
        statistics: The weights that forward passes move; replicas must agree on them.
        state: Its named state.
        kept: Where `apply` leaves the gradients it was given; empty unless `keep_gradients` was called.
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
        self.model = portable.build_model(spec, "tensorflow", scope, recomputed)
        if isinstance(self.model, tf.Module):
            recompute(self.model, spec)
        require_precision(self.model, spec.precision)
        with scope():
            self._build_around_model(spec)

    def _build_around_model(self, spec: TrainingSpec) -> None:
        trainable, others = weights_of(self.model, spec)
        self._trainable = trainable
        self._values = [native(variable) for variable in trainable]
        self._others = [native(variable) for variable in others]
        self._moved = moving_statistics(self.model)
        self.statistics = [native(variable) for variable in self._moved]
        self._spec = spec
        self._rate: Any = None
        self._slots_elsewhere: set[str] = set()
        self._bound: float | None = None
        self._make_optimizer()
        self._prepare_optimizer(trainable)
        self.kept: list[tf.Variable] = []
        apart = generators_apart(spec, "tensorflow", self.model)
        self._unseeded = apart[UNSEEDED]
        self._generators = {name: generator.state for name, generator in apart.items()}
        self._generators |= private.generators_of(self.model)
        self.state = NamedState(
            trainable,
            others,
            {
                "optimizer": self._slots,
                "loss-scale": lambda: portable.loss_scale_variables(self._optimizer),
                "random": lambda: self._generators,
                "metrics": lambda: sums(self._shown_metrics),
            },
        )
        self._forward = forward(self.model, training=False)
        self._losses = {training: self._loss(spec, training) for training in (True, False)}
        training, self._given_metrics = keras_losses.build_measures(spec, "tensorflow")
        evaluation, _ = keras_losses.build_measures(spec, "tensorflow")
        self._metrics: dict[Phase, list[keras.metrics.Metric]] = {
            "train": training,
            "evaluation": evaluation,
        }
        self._evaluated = tf.Variable(
            tf.zeros((2, 1 + len(spec.losses("tensorflow"))), tf.float64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def _loss(self, spec: TrainingSpec, training: bool) -> Compute:
        compute = loss_computer(spec, self.model, training)
        return compiled(compute) if spec.compile else compute

    def not_carried(self) -> list[str]:
        """What steps of a tf.Module may depend on, and no variable holds."""
        if isinstance(self.model, keras.Layer):
            return []
        return [
            "what a tf.Module draws by tf.random or tf.nn.dropout: TensorFlow counts it where nobody can read"
            " it; a tf.random.Generator that the module holds is carried over"
        ]

    def _make_optimizer(self, name: str | None = None) -> None:
        """Makes an optimizer without slots."""
        self._optimizer = portable.build_optimizer(self._spec, "tensorflow", name)
        self._scales_loss = isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer)
        self._rate_variable = self._optimizer.learning_rate
        self._shared_slots = set(self._slots())

    def _slots(self) -> dict[str, Any]:
        return slots(self._optimizer, self._rate_variable)

    def keep_slots_of(self, places: Sequence[int]) -> None:
        """Updates these of the trainable weights only from now on, and has slots for these; not traced.

        They are made out of the scope of the strategy, whose workers would make equal ones together.
        """
        before = self._slots().keys()
        self._make_optimizer(self._optimizer.name)
        self._prepare_optimizer([self._trainable[place] for place in places])
        self._slots_elsewhere = before - self._slots().keys()
        self._bound, self._optimizer.global_clipnorm = self._optimizer.global_clipnorm, None

    def is_alone(self, slot: str) -> bool:
        """Whether an optimizer slot is of a weight that this replica alone updates."""
        own = bool(self._slots_elsewhere) and slot in self._slots()
        return own and slot not in self._shared_slots

    def is_elsewhere(self, slot: str) -> bool:
        """Whether an optimizer slot is of a weight that only another replica updates."""
        return slot in self._slots_elsewhere

    def _prepare_optimizer(self, updated: list[Any]) -> None:
        """Makes the slots, hands over the learning rate, and takes away the own reduction."""
        self._updated = updated
        inner = self._optimizer.inner_optimizer if self._scales_loss else self._optimizer
        self._optimizer.build(self._updated)
        inner.learning_rate = lambda: self._rate
        keras_private.apply_as_given(inner)

    @property
    def _shown_metrics(self) -> dict[str, keras.metrics.Metric]:
        """The training metrics by the names of their results."""
        pairs = zip(self._metrics["train"], self._given_metrics, strict=True)
        return {given.shown(metric.name): metric for metric, given in pairs}

    @property
    def late_metrics(self) -> list[str]:
        """The training metrics that make their variables when they see the first samples."""
        shown = self._shown_metrics.items()
        return [name for name, metric in shown if portable.built_late([metric])]

    @contextlib.contextmanager
    def learning_rate(self, rate: tf.Tensor) -> Iterator[None]:
        """Makes the updates that are traced within it use `rate`."""
        self._rate = rate
        try:
            yield
        finally:
            self._rate = None

    def note_learning_rate(self, rate: float) -> None:
        """Shows the rate in the named state; not traced."""
        self._rate_variable.assign(rate)

    def contribution(
        self,
        pieces: Sequence[Piece],
        weights: tf.Tensor | None,
        holes: bool,
        total: Total,
        local: bool = False,
        take: Callable[[Gradients], Gradients] = list,
    ) -> tuple[tf.Tensor, Gradients]:
        """Computes a replica's share of the loss and its gradients.

        Args:
            pieces: The replica's slices, one after the other.
            weights: The weight of each, shape `[pieces]`; None when all are 1.
            holes: Whether a slice may be a placeholder, which is one of weight 0.
            total: Sums a tensor over all replicas.
            local: Whether the gradients are to be those of this replica's own mean.
            take: What becomes of the gradients of each slice before they are added up.

        Returns:
            The sum over the slices of weight * mean loss, and its gradients (of the scaled loss,
            where the precision needs loss scaling).
        """
        shares = Shares(weights, lambda: [self._counted(piece) for piece in pieces], total, local)
        loss: tf.Tensor | None = None
        sums: Gradients = []
        for index, piece in enumerate(pieces):
            weight = None if weights is None else weights[index]
            before = [] if loss is None else [loss, *(g for g in sums if g is not None)]
            with tf.control_dependencies(before), self._kept_where(holes, weight, "train"):
                share, gradients = self._forward_and_backward(piece, shares, index)
                gradients = take(gradients)
                loss = share if loss is None else loss + share
                sums = gradients if not sums else list(map(_add, sums, gradients))
        assert loss is not None
        return loss, sums

    def counts_unalike(self, piece: Piece) -> bool:
        """Whether the loss of such slices counts targets by more than their number."""
        return bool(self._losses[False](*piece)[0].shape.rank)

    def _counted(self, piece: Piece) -> tf.Tensor:
        """What the losses that do not count all targets alike count by in a slice; nothing moves.

        For a Keras model no variable is assigned to, not even what it has: others may train it meanwhile.
        """
        is_keras = isinstance(self.model, keras.Layer)
        undone = undone_where(tf.constant(True), self.statistics)
        with keras.StatelessScope() if is_keras else undone:
            return self._losses[False](*piece)[0][1, 1:]

    def contribution_aside(
        self, pieces: Sequence[Piece], weights: tf.Tensor, shift: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As `contribution` for a Keras model, but assigns to no variable: it may be traced for others.

        Args:
            pieces: The slices, none a placeholder.
            weights: Of each.
            shift: What the seeds of random layers are moved by, shape `[2]`.

        Returns:
            The loss; gradients and then changes of the moving statistics in one vector; and the sums of
            the training metrics over these slices.
        """
        metrics = [v for metric in self._metrics["train"] for v in metric.variables]
        with keras.StatelessScope() as scope, moved_seeds(lambda: shift):
            for variable in metrics:
                scope.add_update((variable, tf.zeros(variable.shape, native(variable).dtype)))
            loss, gradients = self.contribution(pieces, weights, holes=False, total=tf.identity)
            after = [scope.get_current_value(variable) for variable in self._moved]
            sums = [scope.get_current_value(variable) for variable in metrics]
        changes = [
            tf.zeros_like(before) if now is None else now - value_of(before)
            for now, before in zip(after, self.statistics, strict=True)
        ]
        return (
            loss,
            joined([*self.unscaled(gradients), *changes], self._values[0].dtype),
            joined([tf.zeros(0, tf.float64), *sums], tf.float64),
        )

    def _forward_and_backward(
        self, piece: Piece, shares: Shares, index: int
    ) -> tuple[tf.Tensor, Gradients]:
        with tf.GradientTape() as tape:
            loss, predictions = self._losses[True](*piece)
            loss, share = shares.of(index, loss)
            scaled = self._optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self._values)
        self._update_metrics("train", piece, predictions)
        # Adam and its kin treat the rows of a sparse gradient wrongly where an index occurs twice.
        return share, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    @contextlib.contextmanager
    def _kept_where(self, holes: bool, weight: tf.Tensor | None, phase: Phase) -> Iterator[None]:
        """Undoes what a placeholder slice did to the moving statistics and metrics.

        Seeds move on, as they do on the replicas that have samples.
        """
        if not holes:
            yield
            return
        assert weight is not None
        moved = [*self.statistics, *self._accumulators(phase)]
        with undone_where(tf.equal(weight, 0), moved):
            yield

    def apply(self, gradients: Gradients) -> None:
        """Clips and applies gradients that are already reduced over the replicas."""
        if self.kept:
            assign_all(self.kept, self.unscaled(gradients))
        self._optimizer.apply(gradients, self._updated)

    def apply_own(self, gradients: Sequence[tf.Tensor], norm: tf.Tensor | None) -> None:
        """Applies reduced gradients of the weights that are updated here, clipped by the norm of all."""
        if norm is not None and self._bound is not None:
            factor = self._bound * tf.minimum(1 / norm, 1 / self._bound)  # as Keras has it
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        self._optimizer.apply(gradients, self._updated)

    def keep_gradients(self, scope: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Makes the `apply` that is traced from now on leave its gradients in `kept`; not traced.

        Args:
            scope: The scope of the `tf.distribute` strategy.
        """
        with scope():
            self.kept = [
                tf.Variable(
                    tf.zeros(value.shape, value.dtype),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.NONE,
                )
                for value in self._values
            ]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Gives the non-trainable state and the training metrics back their values; not traced."""
        generators = map(native, self._generators.values())
        moved = (*self._others, *self._accumulators("train"), *generators)
        variables = [c for variable in moved for c in copies(variable)]
        before = [tf.identity(variable) for variable in variables]
        try:
            yield
        finally:
            assign_all(variables, before)

    def apply_unless(self, empty: tf.Tensor, gradients: Gradients) -> None:
        """Applies gradients, and undoes it where `empty` is true."""
        slots = [native(variable) for variable in self._optimizer.variables]
        with undone_where(empty, [*self._values, *slots]):
            self.apply(gradients)

    def unscaled(self, gradients: Gradients) -> list[tf.Tensor]:
        """Takes the loss scale out of gradients, and puts zeros for None."""
        dense = [
            tf.zeros_like(value) if gradient is None else gradient
            for gradient, value in zip(gradients, self._values, strict=True)
        ]
        if not self._scales_loss:
            return dense
        scale = self._optimizer.dynamic_scale
        return [gradient / tf.cast(scale, gradient.dtype) for gradient in dense]

    def rescaled(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Puts the loss scale back into gradients, as `apply` expects them."""
        return [self._optimizer.scale_loss(gradient) for gradient in gradients]

    def draw_unseeded(self) -> None:
        """Lets this thread, where a replica is traced, draw by the generator that is part of the state."""
        keras_private.draw_unseeded_by(self._unseeded)

    def average_parameters(self, mean: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        """Replaces every trainable weight by what `mean` makes of it."""
        assign_all(self._values, mean([value_of(value) for value in self._values]))

    def part(self, name: StatePart) -> list[tf.Variable]:
        """The variables of a part of the state, as strategies read and write them."""
        if name == "trainable":
            return self._values
        if name == "statistics":
            return self.statistics
        slots = [native(variable) for variable in self._optimizer.variables]
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

    def evaluate(self, pieces: Sequence[Piece], counts: tf.Tensor, holes: bool) -> None:
        """Adds slices to this replica's evaluation accumulators; `counts` has shape `[pieces]`."""
        for index, piece in enumerate(pieces):
            count = counts[index]
            with self._kept_where(holes, count, "evaluation"):
                loss, predictions = self._losses[False](*piece)
                self._update_metrics("evaluation", piece, predictions)
            self._evaluated.assign_add(evaluated_rows(loss, count, self._evaluated.shape[1]))

    def predict(self, inputs: Any) -> Any:
        """What the model gives in evaluation mode."""
        return self._forward(inputs)

    def _update_metrics(self, phase: Phase, piece: Piece, predictions: Any) -> None:
        names = Outputs.of_keras(self.model)
        given = self._given_metrics
        portable.update_metrics(self._metrics[phase], piece[1], predictions, given, names)

    def collect(
        self, phase: Phase, total: Callable[[list[tf.Tensor]], list[tf.Tensor]]
    ) -> dict[str, Any]:
        """Gives the metrics of all replicas, and resets this one's.

        Args:
            phase: Whose accumulators.
            total: Sums tensors over all replicas.
        """
        results: dict[str, Any] = {}
        if phase == "evaluation":
            (evaluated,) = total([value_of(self._evaluated)])
            means = tf.math.divide_no_nan(evaluated[0, 1:], evaluated[1, 1:])
            results["loss"] = evaluated[0, 0] / evaluated[1, 0] + tf.reduce_sum(means)
            self._evaluated.assign(tf.zeros_like(evaluated))
        for metric, given in zip(self._metrics[phase], self._given_metrics, strict=True):
            sums = total([value_of(native(v)) for v in metric.variables])
            name = given.shown(metric.name)
            results[name] = portable.numbers(name, metric.stateless_result(sums))
            metric.reset_state()
        return results

    def take_metrics(self) -> tf.Tensor:
        """The sums of this replica's training metrics in one float64 vector; they start anew."""
        portable.require_sums(self._metrics["train"])
        values = [value_of(variable) for variable in self._accumulators("train")]
        taken = joined([tf.zeros(0, tf.float64), *values], tf.float64)
        with tf.control_dependencies([taken]):
            for metric in self._metrics["train"]:
                metric.reset_state()
        return taken

    def add_metrics(self, sums: tf.Tensor) -> None:
        """Adds the sums of others to this replica's."""
        variables = self._accumulators("train")
        parts = tf.split(sums, [variable.shape.num_elements() for variable in variables])
        for variable, part in zip(variables, parts, strict=True):
            part = tf.reshape(part, variable.shape)
            variable.assign(value_of(variable) + tf.cast(part, variable.dtype))

    def _accumulators(self, phase: Phase) -> list[tf.Variable]:
        return [native(v) for metric in self._metrics[phase] for v in metric.variables]


def _add(total: tf.Tensor | None, term: tf.Tensor | None) -> tf.Tensor | None:
    if total is None or term is None:
        return term if total is None else total
    return total + term
