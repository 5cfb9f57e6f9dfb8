"""Evaluation and prediction: forward passes over whole data sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.device_mesh import TENSOR
from isotrain.core.contracts.events import Evaluating
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.arrays import as_arrays
from isotrain.core.data.batch import Batch
from isotrain.core.data.pytree import map_tree
from isotrain.core.data.sources import ShardedStream
from isotrain.core.errors import DataError, UnsupportedError
from isotrain.core.session.training.consensus import require_same_samples
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.ordered_steps import OrderedSteps, require_equal_layers
from isotrain.core.session.training.predictions import as_numpy, predict_batch
from isotrain.core.session.training.weight_average import WeightAverage
from isotrain.core.session.training.whole_set_metrics import WholeSetMetrics
from isotrain.core.session.weights.weights_file import has_all_weights


class Evaluator:
    """Evaluates and predicts with the present weights, or their average. Collective."""

    def __init__(
        self,
        session_context: SessionContext,
        reporter: Reporter,
        average: WeightAverage,
        values: Callable[[], Mapping[str, float]],
    ) -> None:
        """Prepares evaluations.

        Args:
            session_context: Objects that this process trains with.
            reporter: Sends events to the launcher.
            average: Average of the weights, if the spec has one.
            values: Gives the values that objectives get in an evaluation now, by name.
        """
        self._group = session_context.group
        self._strategy = session_context.strategy
        self._loaders = session_context.loaders
        self._metrics_over_all = session_context.spec.metrics_over_all
        self._reporter = reporter
        self._average = average
        self._spec = session_context.spec
        self._mesh = session_context.plan.device_mesh
        self._values = values

    def evaluate(self, data: Any) -> dict[str, float]:
        """Computes loss and metrics over a data set, as `Session.evaluate`."""
        with self._reporter.doing("evaluate"):
            source = self._source(data, "evaluate")
            if self._reporter.rank == 0:
                self._reporter.emit(Evaluating())
            whole_set = WholeSetMetrics(self._metrics_over_all, self._group)
            if self._metrics_over_all:
                _require_global_order(source, "metrics_over_all")
            step = self._group.evaluation_step
            if self._spec.reproducible is not None:
                require_equal_layers(self._group, self._spec)
                step = OrderedSteps(self._group).evaluation_step
            with self._evaluated_weights():
                for batch in self._loaders.evaluation(source, self._spec.parts):
                    self._reporter.enter("evaluate")  # again: timeouts.progress is for each batch
                    require_same_samples(self._group, batch)
                    step(replace(batch, values=self._values()))
                    whole_set.add(batch)
            return self._group.collect_metrics("evaluation") | whole_set.results()

    def validate(self) -> dict[str, float]:
        """Evaluates on all of the data's validation sets, as `Session.validate`."""
        return {
            f"{prefix}{name}": value
            for prefix, source in self._loaders.data.all_validation.items()
            for name, value in self.evaluate(source).items()
        }

    def try_metrics(self, batch: Batch) -> dict[str, float]:
        """Checks on one batch that all metrics return numbers, as `Session.try_metrics`."""
        with self._reporter.doing("try metrics"), self._group.preserving_training_state():
            with self._strategy.evaluating(self._group):
                self._group.evaluation_step(batch)
            return self._group.collect_metrics("evaluation")

    def predictions(self, data: Any) -> Iterator[Any]:
        """Yields predictions, one global batch at a time: arrays `[samples of the batch, ...]`.

        Data and errors are those of `Session.predict`.
        """
        source = self._source(data, "predict")
        _require_global_order(source, "predict")
        with self._evaluated_weights():
            for batch in self._loaders.evaluation(source):
                with self._reporter.doing("predict"):
                    require_same_samples(self._group, batch)
                    predictions = predict_batch(self._group, batch)
                yield predictions

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """Context in which the replicas hold the weights to evaluate, and after which nothing has changed."""
        with (
            self._average.applied(self._group),
            self._strategy.evaluating(self._group),
            self._group.preserving_state(),
        ):
            yield

    def call(self, inputs: Any) -> Any:
        """Calls the model on arrays of this process, as `Session.call`. Local."""
        if TENSOR in self._mesh.sizes or not self._has_all_weights:
            raise UnsupportedError(
                "session.call: the weights are spread over several processes, and it is a call of one alone."
                " session.predict(inputs) on all processes gathers them."
            )
        tensors = map_tree(self._loaders.to_device, as_arrays(inputs, "inputs"))
        with self._group.preserving_state():
            outputs = self._group.predict([tensors] * len(self._group.local_replicas))
        return as_numpy(self._group, outputs[0])

    @functools.cached_property
    def _has_all_weights(self) -> bool:
        return has_all_weights(self._group)

    def _source(self, data: Any, call: str) -> Any:
        source = self._loaders.data.validation if data is None else self._loaders.source(data)
        if source is None:
            raise DataError(
                f"{call}: the spec's data has no validation part. Return"
                " isotrain.DataSet(train, validation) from the data function, or pass data."
            )
        return source


def _require_global_order(source: Any, call: str) -> None:
    """Refuses a source whose samples have no global order.

    Raises:
        DataError: It shards itself.
    """
    if isinstance(source, ShardedStream):
        raise DataError(
            f"{call}: a stream that shards itself has no global order of samples, which predictions"
            " need. Give the samples as arrays, or as a stream of global batches."
        )
