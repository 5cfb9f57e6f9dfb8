"""The metrics of a TensorFlow process, and the loss of its evaluations.

Each local replica has sums of its own. What is called while a `tf.function` is traced concerns the
replica that is traced; the constructor and `late` are not traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras.losses import Losses
from isotrain.adapters.tensorflow.base.variables import flatten, value_of
from isotrain.adapters.tensorflow.trainer.loss import evaluated_rows
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import Phase, TrainingSpec


class MetricCollection:
    """What the replicas of this process measure while they train and are evaluated."""

    def __init__(
        self,
        spec: TrainingSpec,
        model: Any,
        losses: Mapping[Phase, Losses],
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Makes the metrics, in the scope of the `tf.distribute` strategy.

        Args:
            spec: Names the metrics.
            model: Tells the names of its outputs.
            losses: That the steps compute, by output.
            scope: That scope.
        """
        self._scope = scope
        self._evaluated: tf.Variable | None = None
        self._sums = (2, 1 + len(spec.losses("tensorflow")))
        self._model = model
        training, self._given = keras_losses.build_metrics_and_losses(
            spec, "tensorflow", losses["train"]
        )
        evaluation, _ = keras_losses.build_metrics_and_losses(
            spec, "tensorflow", losses["evaluation"]
        )
        self._metrics: dict[Phase, list[keras.metrics.Metric]] = {
            "train": training,
            "evaluation": evaluation,
        }

    def ensure_built(self) -> None:
        """Makes what the losses of evaluations are summed up in, where they are not yet; not traced.

        Every process calls it before its first evaluation is traced: no training waits for that.
        """
        if self._evaluated is None:
            with self._scope():
                self._evaluated = tf.Variable(
                    tf.zeros(self._sums, tf.float64),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )

    @property
    def shown(self) -> dict[str, keras.metrics.Metric]:
        """The training metrics by the names of their results."""
        pairs = zip(self._metrics["train"], self._given, strict=True)
        return {given.shown(metric.name): metric for metric, given in pairs}

    @property
    def unbuilt(self) -> list[str]:
        """The training metrics that make their variables when they see the first samples."""
        shown = self.shown.items()
        return [name for name, metric in shown if keras_model.unbuilt_metrics([metric])]

    def update(self, phase: Phase, targets: Any, predictions: Any) -> None:
        """Adds a slice to the sums of a phase."""
        names = OutputSelector.of_keras(self._model)
        keras_model.update_metrics(self._metrics[phase], targets, predictions, self._given, names)

    def add_loss(self, loss: tf.Tensor, count: tf.Tensor) -> None:
        """Adds the loss of a slice of `count` samples to the sums of the evaluation."""
        assert self._evaluated is not None
        self._evaluated.assign_add(evaluated_rows(loss, count, self._evaluated.shape[1]))

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
            assert self._evaluated is not None
            (evaluated,) = total([value_of(self._evaluated)])
            means = tf.math.divide_no_nan(evaluated[0, 1:], evaluated[1, 1:])
            results["loss"] = evaluated[0, 0] / evaluated[1, 0] + tf.reduce_sum(means)
            self._evaluated.assign(tf.zeros_like(evaluated))
        for metric, given in zip(self._metrics[phase], self._given, strict=True):
            sums = total([value_of(native(v)) for v in metric.variables])
            name = given.shown(metric.name)
            results[name] = keras_model.float64_results(name, metric.stateless_result(sums))
            metric.reset_state()
        return results

    def take(self) -> tf.Tensor:
        """The sums of this replica's training metrics in one float64 vector; they start anew."""
        keras_model.require_sums(self._metrics["train"])
        values = [value_of(variable) for variable in self.accumulators("train")]
        taken = flatten([tf.zeros(0, tf.float64), *values], tf.float64)
        with tf.control_dependencies([taken]):
            for metric in self._metrics["train"]:
                metric.reset_state()
        return taken

    def add(self, sums: tf.Tensor) -> None:
        """Adds the sums of others to this replica's."""
        variables = self.accumulators("train")
        parts = tf.split(sums, [variable.shape.num_elements() for variable in variables])
        for variable, part in zip(variables, parts, strict=True):
            part = tf.reshape(part, variable.shape)
            variable.assign(value_of(variable) + tf.cast(part, variable.dtype))

    def variables(self, phase: Phase) -> list[Any]:
        """The sums of a phase's metrics, as Keras has them."""
        return [variable for metric in self._metrics[phase] for variable in metric.variables]

    def accumulators(self, phase: Phase) -> list[tf.Variable]:
        """The sums of a phase's metrics, as TensorFlow has them."""
        return [native(variable) for variable in self.variables(phase)]
