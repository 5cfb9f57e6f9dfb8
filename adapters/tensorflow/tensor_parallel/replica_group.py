"""Replica group of one TensorFlow process of a tensor-parallel run, over any communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator
from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.tensor_parallel.trainer import TensorParallelTrainer
from isotrain.plugin import Batch, Computation, TrainingSpec


class TensorParallelReplicaGroup(TensorFlowReplicaGroup):
    """Replica group of one part of a replica, which has parts of some weights and all of the others."""

    _trainer: TensorParallelTrainer
    _communicator: PipelineCommunicator

    def __init__(
        self,
        spec: TrainingSpec,
        communicator: PipelineCommunicator,
        layers: Sequence[str] | Mapping[str, str],
    ) -> None:
        """Builds the model, and cuts layers. Collective.

        Args:
            spec: Training spec.
            communicator: Communicator of this part.
            layers: The layers to cut, as `TensorParallelBackend.start_tensor_parallel` gets them.
        """
        self._layers = layers
        super().__init__(spec, tf.distribute.get_strategy(), communicator)

    def _build(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> TensorParallelTrainer:
        return TensorParallelTrainer(spec, self._communicator, self._layers)

    def synchronous_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        self.reshard_weights()
        return super().synchronous_step(batch, learning_rate)

    def keep_gradients(self) -> bool:
        return False

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        results = super().compute(computation, *values, static=static)
        if self._trainer.weights.is_unsharded:  # it may have changed weights
            self._gather()
        return results

    def unshard_weights(self) -> None:
        if not self._trainer.weights.is_unsharded:
            self._gather()

    def _gather(self) -> None:
        """Gathers the weights that are cut, for reading. Collective."""
        weights = self._trainer.weights
        weights.keep(self._traced.function("gather weights", weights.trace_gather)())

    def reshard_weights(self) -> None:
        self._trainer.weights.forget()

    def plan_notes(self) -> list[str]:
        return [*super().plan_notes(), *self._trainer.cut_notes]

    @property
    def is_single_process(self) -> bool:
        return False

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        function = self._traced.function("max", self._communicator.max_over_all)
        return [float(number) for number in function(tf.constant(numbers, tf.float64))]

    def barrier(self) -> None:
        ones = [tf.ones(())]
        self._traced.function("barrier", lambda: self._communicator.sum_over_all(ones))()[0].numpy()
