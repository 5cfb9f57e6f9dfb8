"""Trainer of a TensorFlow replica that keeps its shard of every weight and slot (ZeRO stage 3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.weight_sharding import require_shardable
from isotrain.adapters.tensorflow.base.variables import assign_all, value_of
from isotrain.adapters.tensorflow.base.xla import Compute
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.sharded.keras_layers import ShardedLayers
from isotrain.adapters.tensorflow.sharded.modules import ShardedModules
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients, WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import NamedState, canonical_names, native
from isotrain.plugin import DeviceMesh, StateInfo, StateKind, TrainingSpec


class ShardedUpdate(WeightUpdate):
    """Updates shards of weights, clipped by the norms of the full gradients."""

    def __init__(self, spec: TrainingSpec, weights: ShardedWeights) -> None:
        """Builds the optimizer, with slots for the shards.

        Args:
            spec: Training spec, which names the optimizer.
            weights: Sharded weights.
        """
        super().__init__(spec, weights.variables)
        self._norms = weights.norms
        self._weight_indices = {
            id(shard): index for index, shard in enumerate(weights.local_shards)
        }
        optimizer = self._optimizer
        self._global_clipnorm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
        self._clipnorm, optimizer.clipnorm = optimizer.clipnorm, None
        if isinstance(optimizer, keras.optimizers.Lamb):
            optimizer.update_step = self._update_lamb

    def sharded_slots(self) -> list[list[Any]]:
        """Slots with a shard per weight: one list per kind of slot, in the order of the weights."""
        return list(keras_private.slots_of(self._optimizer).values())

    def apply(self, gradients: Gradients) -> None:
        """Clips and applies gradients of shards, of the shards' shapes, already means over replicas."""
        dense = self.unscaled(gradients)
        if self._clipnorm:
            factors = self._clipnorm / tf.maximum(self._norms(dense), self._clipnorm)
            pairs = zip(dense, tf.unstack(factors), strict=True)
            dense = [gradient * tf.cast(factor, gradient.dtype) for gradient, factor in pairs]
        self.apply_shard(dense, tf.norm(self._norms(dense)) if self._global_clipnorm else None)

    def _update_lamb(self, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        """Keras' LAMB step, with the norms of the full weight and of the full update.

        Args:
            gradient: Gradient of a shard, of the shard's shape.
            variable: The shard.
            rate: Learning rate, a scalar.
        """
        lamb, index, dtype = self._optimizer, self._weight_indices[id(variable)], variable.dtype
        slots = keras_private.slots_of(lamb)
        mean, square = slots["momentum"][index], slots["velocity"][index]
        step = tf.cast(lamb.iterations + 1, dtype)
        lamb.assign_add(mean, (gradient - mean) * (1 - lamb.beta_1))
        lamb.assign_add(square, (gradient**2 - square) * (1 - lamb.beta_2))
        scale = tf.sqrt(square / (1 - tf.cast(lamb.beta_2, dtype) ** step)) + lamb.epsilon
        update = mean / (1 - tf.cast(lamb.beta_1, dtype) ** step) / scale
        weight_norm, update_norm = tf.unstack(self._norms([variable, update]))
        are_positive = tf.logical_and(weight_norm > 0, update_norm > 0)
        ratio = tf.where(are_positive, tf.math.divide_no_nan(weight_norm, update_norm), 1.0)
        lamb.assign_sub(variable, tf.cast(ratio, dtype) * tf.cast(rate, dtype) * update)


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
        self._values = self.weights.local_shards
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


class ShardedState(NamedState):
    """State of a sharded replica: its shards of weights and slots; full weights, while they are gathered."""

    def __init__(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
        weights: ShardedWeights,
        slots: Callable[[], list[list[Any]]],
    ) -> None:
        """Names the variables, as `NamedState` does.

        Args:
            trainable: Trainable weights.
            others: Other weights.
            kinds: For each other kind of state, a function that returns its variables by name.
            weights: The sharded trainable weights.
            slots: Returns the sharded optimizer slots: one list per kind, in the order of the weights.
        """
        super().__init__(trainable, others, kinds)
        self._sharded_weights = weights
        self._weight_names = list(self._weights["trainable"])
        sharded_variables = [weights.variables, *slots()]
        self._weight_indices = {
            id(native(variable)): index
            for variables in sharded_variables
            for index, variable in enumerate(variables)
        }

    def _variables(self, kinds: Sequence[StateKind]) -> dict[str, tf.Variable]:
        """Variables of these kinds by full name; weights in their local shapes, unless unsharded."""
        named = super()._variables(kinds)
        if "trainable" in kinds and not self._sharded_weights.is_unsharded:
            named |= dict(zip(self._weight_names, self._sharded_weights.local_shards, strict=True))
        return named

    def describe(self, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        variables = self._variables(kinds)
        return {
            name: self._described(info, self._weight_indices.get(id(variables[name])))
            for name, info in super().describe(kinds).items()
        }

    def _described(self, info: StateInfo, index: int | None) -> StateInfo:
        if index is None:
            return info
        weights = self._sharded_weights
        shard_spec, shard_index = weights.shard_specs[index], weights.shard_index
        return replace(
            info,
            shape=tuple(shard_spec.shape),
            offset=tuple(shard_spec.shard_offset(shard_index)),
            shard_shape=tuple(shard_spec.shard_shape(shard_index)),
        )

    def write(self, state: Mapping[str, np.ndarray], index: int | None = None) -> None:
        variables = self._variables((*self._weights, *self._kinds))
        super().write(
            {name: self._local_shard(variables.get(name), array) for name, array in state.items()},
            index,
        )
        if self._sharded_weights.is_unsharded:
            names = enumerate(self._weight_names)
            self._sharded_weights.refresh_shards([i for i, name in names if name in state])

    def _local_shard(self, variable: tf.Variable | None, array: np.ndarray) -> np.ndarray:
        """The local shard of an array of a full weight's shape; any other array as it is."""
        index = None if variable is None else self._weight_indices.get(id(variable))
        if index is None or np.shape(array) != tuple(
            self._sharded_weights.shard_specs[index].shape
        ):
            return array
        shard: np.ndarray = self._sharded_weights.local_shard_of(index, array)
        return shard
