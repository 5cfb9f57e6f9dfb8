"""Trainer of a TensorFlow replica that keeps its shard of every weight and slot (ZeRO stage 3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras.weight_sharding import require_shardable
from isotrain.adapters.tensorflow.base.variables import assign_all, value_of
from isotrain.adapters.tensorflow.base.xla import Compute
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.sharded.keras_layers import ShardedLayers
from isotrain.adapters.tensorflow.sharded.modules import ShardedModules
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.local_shards import ShardedState, ShardedUpdate
from isotrain.adapters.tensorflow.trainer.state import NamedState, canonical_names
from isotrain.plugin import DeviceMesh, StateKind, TrainingSpec


class ShardedTrainer(ReplicaTrainer):
    """Computes with weights gathered layer by layer, or module by module; updates the local shards.

    Attributes:
        weights: The sharded weights.
        update: Optimizer of the local shards.
    """

    weights: ShardedWeights
    update: ShardedUpdate
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
        super().__init__(spec)
        self._compute[True] = self._gathering(self._compute[True])

    def _build_model(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Any:
        """Builds the model without recomputation: layers that gather weights recompute themselves."""
        return keras_model.build_model(spec.replace(recompute=()), "tensorflow", scope)

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> ShardedUpdate:
        """Shards the weights first: there are never slots for all of them."""
        require_shardable(dict(zip(canonical_names(trainable), trainable, strict=True)))
        self._broadcast_initial_values()
        self.weights = ShardedWeights(trainable, self._communicator, self._mesh)
        self._values = [shard.local for shard in self.weights.shards]
        is_called = spec.objective is None and spec.call is None  # which may call some layers
        layer_class = ShardedLayers if isinstance(self.model, keras.Layer) else ShardedModules
        self._layers = layer_class(self.model, self.weights, self._unit_bytes, is_called)
        self._layers.recompute(self.model, spec)
        return ShardedUpdate(spec, self.weights)

    def _broadcast_initial_values(self) -> None:
        """Broadcasts the weights of replica 0 to all. Collective."""
        variables, everyone = [*self._values, *self.others], range(self._communicator.replicas)

        def broadcast() -> None:
            values = [
                self._communicator.broadcast_within(value_of(each), (tuple(everyone),))
                for each in variables
            ]
            assign_all(variables, values)

        tf.function(broadcast, autograph=False)()

    def _state_of(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
    ) -> NamedState:
        return ShardedState(trainable, others, kinds, self.weights, self.update.sharded_slots)

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
