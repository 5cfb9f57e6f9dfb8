"""Trainer of a TensorFlow replica that keeps its shard of every weight and slot (ZeRO stage 3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras.weight_sharding import require_shardable
from isotrain.adapters.tensorflow.base.xla import Compute
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.sharded.keras_layers import ShardedLayers
from isotrain.adapters.tensorflow.sharded.modules import ShardedModules
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, built_model
from isotrain.adapters.tensorflow.trainer.local_shards import LocalShardsTrainer, ShardedUpdate
from isotrain.adapters.tensorflow.trainer.state import canonical_names
from isotrain.plugin import DeviceMesh, TrainingSpec


class ShardedTrainer(LocalShardsTrainer):
    """Computes with weights gathered layer by layer, or module by module; updates the local shards.

    With `reproducible`, it computes with all weights, which are gathered before, and updates the shards by
    whole gradients.
    """

    weights: ShardedWeights
    _layers: ShardedLayers | ShardedModules

    def __init__(
        self, spec: TrainingSpec, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int
    ) -> None:
        """Builds the model, the optimizer and the metrics. Collective.

        Args:
            spec: Training spec.
            communicator: Communicator with the other replicas.
            mesh: Device mesh of the replicas.
            unit_bytes: Bytes of weights that are gathered together, where layers allow it.
        """
        self._communicator = communicator
        self._mesh = mesh
        self._unit_bytes = unit_bytes
        self._gathers_by_unit = spec.reproducible is None
        super().__init__(spec)
        if self._gathers_by_unit:
            self._compute[True] = self._gathering(self._compute[True])

    def _build_model(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Any:
        """Builds the model; without recomputation where layers that gather weights recompute themselves."""
        if not self._gathers_by_unit:
            return super()._build_model(spec, scope)
        return built_model(spec.replace(recompute=()), scope)

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> ShardedUpdate:
        """Shards the weights first: there are never slots for all of them."""
        require_shardable(dict(zip(canonical_names(trainable), trainable, strict=True)))
        self._broadcast_initial_values()
        self.weights = ShardedWeights(trainable, self._communicator, self._mesh)
        is_called = spec.objective is None and spec.call is None  # which may call some layers
        layer_class = ShardedLayers if isinstance(self.model, keras.Layer) else ShardedModules
        self._layers = layer_class(self.model, self.weights, self._unit_bytes, is_called)
        if self._gathers_by_unit:
            self._layers.recompute(self.model, spec)
        return self._update_of_shards(spec, takes_whole_gradients=not self._gathers_by_unit)

    def _broadcast_from_first(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._communicator.broadcast_within(
            tensor, (tuple(range(self._communicator.replicas)),)
        )

    def _gathering(self, compute: Compute) -> Compute:
        def compute_gathered(inputs: Any, targets: Any) -> tuple[Any, Any]:
            with self._layers.gather_on_read():
                return compute(inputs, targets)

        return compute_gathered

    def _loss_denominators(self, micro_batch: MicroBatch) -> tf.Tensor:
        """Loss denominators, shape `[losses]`; computed with zeros for weights, which do not matter."""
        with self._layers.with_zero_weights():
            return self._compute[False](*micro_batch)[0][1, 1:]

    def trace_unshard(self) -> None:
        """Gathers all weights, while this is traced. Collective."""
        self.weights.trace_unshard(self._unit_bytes)
