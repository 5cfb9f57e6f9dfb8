"""Metrics of a TensorFlow process, and the loss of its evaluations.

Each local replica has accumulators of its own. Methods called while a `tf.function` is traced concern the
replica that is traced; the constructor, `shown` and `unbuilt` are not traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.objective import MAX_LOSSES, Objective
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras.losses import Losses
from isotrain.adapters.tensorflow.base.variables import assign_all, flatten, value_of
from isotrain.adapters.tensorflow.trainer.loss import evaluated_rows
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import Component, Phase, SpecError, TrainingSpec


class NamedLosses(keras.metrics.Metric):
    """Mean of each named loss that an objective returns; no results where it returns a single loss."""

    NAME = "objective"
    needs_predictions = False

    def __init__(self, objective: Objective, compiles: bool) -> None:
        """Adds the metric's variable, which starts at zero.

        Args:
            objective: The objective.
            compiles: Whether XLA compiles it.
        """
        super().__init__(name=self.NAME)
        self._objective = objective
        self._compiles = compiles
        self._sums = self.add_variable(
            shape=(2, MAX_LOSSES), initializer="zeros", name="sums", dtype="float64"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the losses; empty where the objective returns a single one."""
        return self._objective.names or ()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any | None = None) -> None:
        """Adds the losses of the objective's last call to the sums.

        Raises:
            SpecError: XLA compiles the objective, which gives the losses to nothing outside.
        """
        if not self.names:
            return
        if self._compiles:
            raise SpecError(
                "compile: named losses of an objective are not recorded from a step that XLA compiles. Return"
                " their sum, or leave compile out."
            )
        count = tf.shape(tf.nest.flatten(self._objective.inputs)[0])[0]
        rows = [
            (tf.cast(mean, tf.float64), tf.cast(count if weights is None else weights, tf.float64))
            for mean, weights in self._objective.latest
        ]
        added = tf.stack([[mean * number, number] for mean, number in rows], axis=1)
        self._sums.assign_add(tf.pad(added, [[0, 0], [0, MAX_LOSSES - len(rows)]]))

    def result(self) -> dict[str, tf.Tensor]:
        """Means by name, float64 scalars."""
        means = tf.math.divide_no_nan(self._sums.value[0], self._sums.value[1])
        return dict(zip(self.names, tf.unstack(means), strict=False))


class MetricCollection:
    """Training and evaluation metrics of the replicas of this process."""

    def __init__(
        self,
        spec: TrainingSpec,
        model: Any,
        losses: Mapping[Phase, Losses],
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
        objective: Objective | None = None,
    ) -> None:
        """Builds the metrics, in the scope of the `tf.distribute` strategy.

        Args:
            spec: Training spec, which names the metrics.
            model: Model, for the names of its outputs.
            losses: Losses of the steps, by phase and output.
            scope: Scope of the strategy.
            objective: The spec's objective, whose named losses are measured; None where it has a loss.
        """
        self._scope = scope
        self._evaluation_loss: tf.Variable | None = None
        self._loss_shape = (2, 1 + (MAX_LOSSES if objective else len(spec.losses("tensorflow"))))
        self._model = model
        training, self._named_metrics = keras_losses.build_metrics_and_losses(
            spec, "tensorflow", losses["train"]
        )
        evaluation, _ = keras_losses.build_metrics_and_losses(
            spec, "tensorflow", losses["evaluation"]
        )
        self._metrics: dict[Phase, list[keras.metrics.Metric]] = {
            "train": training,
            "evaluation": evaluation,
        }
        if objective is not None:
            self._named_metrics = [*self._named_metrics, Component(NamedLosses.NAME)]
            for metrics in self._metrics.values():
                metrics.append(NamedLosses(objective, spec.compile))

    def ensure_built(self) -> None:
        """Creates the accumulator of the evaluation loss if it is missing; not traced.

        Every process calls it before its first evaluation is traced: training need not wait for that.
        """
        if self._evaluation_loss is None:
            with self._scope():
                self._evaluation_loss = tf.Variable(
                    tf.zeros(self._loss_shape, tf.float64),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )

    @property
    def shown(self) -> dict[str, keras.metrics.Metric]:
        """Training metrics by the names of their results."""
        pairs = zip(self._metrics["train"], self._named_metrics, strict=True)
        return {named.shown(metric.name): metric for metric, named in pairs}

    @property
    def unbuilt(self) -> list[str]:
        """Names of training metrics that create their variables at their first samples."""
        shown = self.shown.items()
        return [name for name, metric in shown if keras_model.unbuilt_metrics([metric])]

    def update(self, phase: Phase, targets: Any, predictions: Any) -> None:
        """Adds a micro-batch to the accumulators of a phase."""
        names = OutputSelector.of_keras(self._model)
        keras_model.update_metrics(
            self._metrics[phase], targets, predictions, self._named_metrics, names
        )

    def add_loss(self, loss: tf.Tensor, count: tf.Tensor) -> None:
        """Adds the loss (shapes: see `evaluated_rows`) of `count` samples, a scalar, to the evaluation."""
        assert self._evaluation_loss is not None
        self._evaluation_loss.assign_add(
            evaluated_rows(loss, count, self._evaluation_loss.shape[1])
        )

    def collect(
        self, phase: Phase, total: Callable[[list[tf.Tensor]], list[tf.Tensor]]
    ) -> dict[str, Any]:
        """Results over all replicas, scalars by name; resets this replica's accumulators. Collective.

        Args:
            phase: Phase whose metrics to collect.
            total: Sums tensors over all replicas.
        """
        results: dict[str, Any] = {}
        if phase == "evaluation":
            assert self._evaluation_loss is not None
            (evaluated,) = total([value_of(self._evaluation_loss)])
            means = tf.math.divide_no_nan(evaluated[0, 1:], evaluated[1, 1:])
            results["loss"] = evaluated[0, 0] / evaluated[1, 0] + tf.reduce_sum(means)
            self._evaluation_loss.assign(tf.zeros_like(evaluated))
        for metric, named in zip(self._metrics[phase], self._named_metrics, strict=True):
            if isinstance(metric, NamedLosses) and not metric.names:
                continue
            sums = total([value_of(native(variable)) for variable in metric.variables])
            name, result = named.shown(metric.name), metric.stateless_result(sums)
            if isinstance(metric, NamedLosses):
                results |= result
            else:
                results[name] = keras_model.float64_results(name, result)
            metric.reset_state()
        return results

    def take(self) -> tf.Tensor:
        """This replica's training accumulators, one float64 vector; resets them."""
        keras_model.require_sums(self._metrics["train"])
        values = [value_of(variable) for variable in self.accumulators("train")]
        taken = flatten([tf.zeros(0, tf.float64), *values], tf.float64)
        with tf.control_dependencies([taken]):
            for metric in self._metrics["train"]:
                metric.reset_state()
        return taken

    def add(self, sums: tf.Tensor) -> None:
        """Adds such a vector to this replica's training accumulators."""
        variables = self.accumulators("train")
        parts = tf.split(sums, [variable.shape.num_elements() for variable in variables])
        for variable, part in zip(variables, parts, strict=True):
            part = tf.reshape(part, variable.shape)
            variable.assign(value_of(variable) + tf.cast(part, variable.dtype))

    @contextlib.contextmanager
    def measuring(self, phase: Phase) -> Iterator[list[tf.Tensor]]:
        """Context whose list has, on exit, what was added to the sums of a phase, which stay."""
        variables = self._sums(phase)
        before = [value_of(variable) for variable in variables]
        assign_all(variables, list(map(tf.zeros_like, before)))
        added: list[tf.Tensor] = []
        yield added
        added += map(value_of, self._sums(phase))
        assign_all(variables, before)

    def add_sums(self, phase: Phase, sums: Sequence[tf.Tensor]) -> None:
        """Adds tensors from `measuring` to this replica's sums of a phase."""
        for variable, addend in zip(self._sums(phase), sums, strict=True):
            variable.assign(value_of(variable) + addend)

    def _sums(self, phase: Phase) -> list[tf.Variable]:
        """Sums of a phase, of any shape: those of the metrics, and of the evaluation loss."""
        losses = [] if phase == "train" else [self._evaluation_loss]
        return [*losses, *self.accumulators(phase)]

    def variables(self, phase: Phase) -> list[Any]:
        """Accumulators of a phase's metrics, as Keras variables."""
        return [variable for metric in self._metrics[phase] for variable in metric.variables]

    def accumulators(self, phase: Phase) -> list[tf.Variable]:
        """Accumulators of a phase's metrics, of any shape, as TensorFlow variables."""
        return [native(variable) for variable in self.variables(phase)]
