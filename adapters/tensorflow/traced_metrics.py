"""The metrics of a process's replicas: read, given away and taken over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from isotrain.adapters import portable
from isotrain.adapters.tensorflow.program import ReplicaTrainer
from isotrain.adapters.tensorflow.tracing import TracedFunctions
from isotrain.plugin import Phase


class TracedMetrics:
    """What a group does with the sums of which metrics consist, one traced function each."""

    def __init__(
        self,
        trainer: ReplicaTrainer,
        traced: TracedFunctions,
        totals: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        """Knows no samples yet.

        Args:
            trainer: Has the metrics.
            traced: What traces.
            totals: Gives the sums of tensors over all processes.
        """
        self._trainer = trainer
        self._traced = traced
        self._totals = totals

    def collect(self, phase: Phase) -> dict[str, float]:
        """Gives the means over all samples of all replicas, and starts them anew."""
        function = self._traced.function(("collect", phase), lambda: self._trace_collect(phase))
        found: dict[str, float] = {}
        for name, result in function().items():
            found |= portable.named_results(name, result)
        return found

    def _trace_collect(self, phase: Phase) -> dict[str, tf.Tensor]:
        return self._traced.on_replicas(
            lambda position: self._trainer.metrics.collect(phase, self._totals)
        )[0]

    def take(self) -> np.ndarray:
        """Gives the sums of the replicas here, and starts them anew. Local."""
        return np.array(self._traced.function("take metrics", self._trace_take)())

    def _trace_take(self) -> tf.Tensor:
        return tf.add_n(self._traced.on_replicas(lambda position: self._trainer.metrics.take()))

    def add(self, sums: np.ndarray) -> None:
        """Adds what `take` of another process gave. Local."""
        self._traced.function("add metrics", self._trace_add)(tf.constant(sums, tf.float64))

    def _trace_add(self, sums: tf.Tensor) -> None:
        """Adds to the metrics of the first replica here alone."""

        def replica(position: int) -> None:
            own = sums if position == 0 else tf.zeros_like(sums)
            self._trainer.metrics.add(own)

        self._traced.on_replicas(replica)
