"""The replica group of one TensorFlow process of a fully sharded run, over any communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.replica.tracing import MicroBatches, Weights
from isotrain.adapters.tensorflow.sharded.trainer import ShardedTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients
from isotrain.plugin import Batch, DeviceMesh, TrainingSpec


class ShardedReplicaGroup(TensorFlowReplicaGroup):
    """One replica that keeps its shard of every weight and optimizer slot between steps (ZeRO stage 3)."""

    _trainer: ShardedTrainer

    def __init__(
        self, spec: TrainingSpec, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int
    ) -> None:
        """Builds the model, and shards its weights. Collective.

        Args:
            spec: Training spec.
            communicator: Communicator with all other replicas; no `tf.distribute` strategy knows of them.
            mesh: Device mesh of the replicas.
            unit_bytes: Bytes of weights that are gathered together, where layers allow it.
        """
        self._mesh = mesh
        self._unit_bytes = unit_bytes
        super().__init__(spec, tf.distribute.get_strategy(), communicator)

    def _build(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> ShardedTrainer:
        return ShardedTrainer(spec, self._communicator, self._mesh, self._unit_bytes)

    def synchronous_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        self.reshard_weights()
        self._set_rate(learning_rate)
        loss, _ = self._on_batch("step", self._trace_sharded_step, batch, self._rate_tensor)
        return loss

    def _trace_sharded_step(
        self, has_placeholders: bool, micro_batches: MicroBatches, weights: Weights, rate: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Traces a step: returns the mean loss, a scalar, and tensors that keep collectives alive."""
        keepalive_outputs = self._trainer.weights.keepalive_outputs = []
        loss = self._trace_step(has_placeholders, micro_batches, weights, rate)
        return loss, list(keepalive_outputs)

    def _reduced(
        self, loss: tf.Tensor, gradients: Gradients, weight: tf.Tensor | None
    ) -> tuple[tf.Tensor, Gradients]:
        """All-reduces the loss, a scalar, and moving statistics; shards' gradients are means already."""
        trainer = self._trainer
        to_reduce = [loss, *trainer.weighted_statistics(weight)]
        loss, *statistics = self._communicator.all_reduce(to_reduce, "mean")
        trainer.agree_on_statistics(statistics)
        return loss, gradients

    def part_sums(self, batch: Batch) -> Iterator[list[list[tf.Tensor]]]:
        """As of a group whose weights are whole: they are gathered once, for all parts. Collective."""
        self.unshard_weights()
        yield from super().part_sums(batch)

    def apply_gradients(
        self, gradients: Sequence[Sequence[tf.Tensor]], learning_rate: float
    ) -> None:
        """Updates this replica's shards; the full weights, which are older then, are freed. Local."""
        super().apply_gradients(gradients, learning_rate)
        self.reshard_weights()

    def reshard_weights(self) -> None:
        self._trainer.weights.reshard()

    def unshard_weights(self) -> None:
        weights = self._trainer.weights
        if not weights.is_unsharded:
            self._traced.function("gather weights", self._trainer.trace_unshard)()
            weights.mark_unsharded()

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Gathers the weights for it, and leaves them as they were. Collective."""
        was_unsharded = self._trainer.weights.is_unsharded
        self.unshard_weights()
        try:
            return super().predict(inputs)
        finally:
            if not was_unsharded:
                self.reshard_weights()

    def keep_gradients(self) -> bool:
        return False
