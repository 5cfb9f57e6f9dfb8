"""Trainer, update and named state of weights of which this process has a shard each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.tensorflow.base.variables import assign_all, value_of
from isotrain.adapters.tensorflow.base.without_values import lacks_value
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients, WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import NamedState, native
from isotrain.plugin import StateInfo, StateKind, TrainingSpec


@dataclass(frozen=True, eq=False)
class VariableShard:
    """This process's shard of a weight.

    Attributes:
        local: The shard.
        shape: Shape of the full weight.
        offset: Start of the shard in the full weight, along each axis; None where every process has all.
    """

    local: tf.Variable
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None

    def of(self, full: Any) -> Any:
        """The shard's part of a tensor or array of the full shape."""
        if self.offset is None:
            return full
        extents = zip(self.offset, self.local.shape, strict=True)
        return full[tuple(slice(start, start + size) for start, size in extents)]

    def describe(self, info: StateInfo) -> StateInfo:
        """Info of a tensor that is sharded like the weight, from that of its shard."""
        if self.offset is None:
            return info
        return replace(info, shape=self.shape, offset=self.offset, shard_shape=info.shape)


class LocalShards(Protocol):
    """The trainable weights of a model, of each of which this process updates a shard.

    Attributes:
        variables: Variables to update, under the names of the weights.
        shards: The shards that these hold.
    """

    variables: list[Any]
    shards: list[VariableShard]

    @property
    def is_unsharded(self) -> bool:
        """Whether the full weights are here too, for reading."""

    @property
    def full_variables(self) -> Sequence[tf.Variable]:
        """The full weights, while they are here."""

    def norms(self, tensors: Sequence[tf.Tensor], indices: Sequence[int]) -> tf.Tensor:
        """L2 norms of full tensors: float64, shape `[tensors]`. Collective.

        Args:
            tensors: This process's shards.
            indices: For each the index of the weight that is sharded like it.
        """


class ShardedUpdate(WeightUpdate):
    """Updates shards of weights, clipped by the norms of the full gradients."""

    def __init__(
        self, spec: TrainingSpec, weights: LocalShards, *, takes_whole_gradients: bool = False
    ) -> None:
        """Builds the optimizer, with slots for the shards.

        Args:
            spec: Training spec, which names the optimizer.
            weights: Sharded weights.
            takes_whole_gradients: Whether `apply` gets gradients of the full weights. It then clips them, and
                updates the shards, with the bits of an update of full weights: the operations of Keras'
                optimizers are elementwise, and each is rounded as IEEE 754 says.
        """
        super().__init__(spec, weights.variables)
        self._shards = weights.shards if takes_whole_gradients else None
        if takes_whole_gradients:
            self._values = list(weights.full_variables)
        self._norms = weights.norms
        self._weight_indices = {id(each.local): index for index, each in enumerate(weights.shards)}
        optimizer = self._optimizer
        self._global_clipnorm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
        self._clipnorm, optimizer.clipnorm = optimizer.clipnorm, None
        if isinstance(optimizer, keras.optimizers.Lamb):
            optimizer.update_step = self._update_lamb

    def sharded_slots(self) -> list[list[Any]]:
        """Slots with a shard per weight: one list per kind of slot, in the order of the weights."""
        return list(keras_private.slots_of(self._optimizer).values())

    def apply(self, gradients: Gradients) -> None:
        """Clips and applies gradients, already means over replicas: of shards, or whole ones."""
        if self._shards is not None:
            self._apply_whole(self._shards, gradients)
            return
        dense, everything = self.unscaled(gradients), range(len(gradients))
        if self.gradient_norms is not None:
            norms = self._norms(dense, everything)
            parts = [tf.gather(norms, [*part]) for part in (everything, *self._norm_parts)]
            measured = tf.stack([tf.norm(part) for part in parts])
            self.gradient_norms.assign(tf.cast(measured, self.gradient_norms.dtype))
        if self._clipnorm:
            norms = self._norms(dense, everything)
            factors = self._clipnorm / tf.maximum(norms, self._clipnorm)
            pairs = zip(dense, tf.unstack(factors), strict=True)
            dense = [gradient * tf.cast(factor, gradient.dtype) for gradient, factor in pairs]
        norm = tf.norm(self._norms(dense, everything)) if self._global_clipnorm else None
        self.apply_shard(dense, norm)

    def _apply_whole(self, shards: Sequence[VariableShard], gradients: Gradients) -> None:
        dense = self.unscaled(gradients)
        self._keep_norms(dense)
        clipped = keras_private.clipped_by_norm(
            self._optimizer, dense, self._clipnorm, self._global_clipnorm
        )
        local = [shard.of(each) for shard, each in zip(shards, clipped, strict=True)]
        self.apply_shard(local, norm=None)

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
        weight_norm, update_norm = tf.unstack(self._norms([variable, update], [index, index]))
        are_positive = tf.logical_and(weight_norm > 0, update_norm > 0)
        ratio = tf.where(are_positive, tf.math.divide_no_nan(weight_norm, update_norm), 1.0)
        lamb.assign_sub(variable, tf.cast(ratio, dtype) * tf.cast(rate, dtype) * update)


class ShardedState(NamedState):
    """State of a sharded replica: its shards of weights and slots; full weights, while they are gathered."""

    def __init__(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
        weights: LocalShards,
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
        self._shards = {
            id(native(variable)): weights.shards[index]
            for variables in sharded_variables
            for index, variable in enumerate(variables)
        }

    def _variables(self, kinds: Sequence[StateKind]) -> dict[str, tf.Variable]:
        """Variables of these kinds by full name; weights in their local shapes, unless unsharded."""
        named = super()._variables(kinds)
        if "trainable" in kinds:
            weights = self._sharded_weights
            local = [shard.local for shard in weights.shards]
            variables = weights.full_variables if weights.is_unsharded else local
            named |= dict(zip(self._weight_names, variables, strict=True))
        return named

    def describe(self, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        variables = self._variables(kinds)
        described = super().describe(kinds)
        for name, info in described.items():
            if (shard := self._shards.get(id(variables[name]))) is not None:
                described[name] = shard.describe(info)
        return described

    def write(self, state: Mapping[str, np.ndarray], index: int | None = None) -> None:
        variables = self._variables((*self._weights, *self._kinds))
        super().write(
            {name: self._local_part(variables.get(name), array) for name, array in state.items()},
            index,
        )
        weights = self._sharded_weights
        if weights.is_unsharded:
            pairs = zip(weights.shards, weights.full_variables, strict=True)
            for name, (shard, full) in zip(self._weight_names, pairs, strict=True):
                if name in state and full is not shard.local:
                    shard.local.assign(shard.of(value_of(full)))

    def _local_part(self, variable: tf.Variable | None, array: np.ndarray) -> np.ndarray:
        """The local shard of an array of a full weight's shape; any other array as it is."""
        shard = self._shards.get(id(variable))
        if shard is None or np.shape(array) != shard.shape:
            return array
        part: np.ndarray = shard.of(array)
        return part


class LocalShardsTrainer(ReplicaTrainer, ABC):
    """Trainer that updates this process's shard of each weight.

    Attributes:
        weights: The trainable weights.
        update: Optimizer of the local shards.
    """

    weights: LocalShards
    update: ShardedUpdate

    @abstractmethod
    def _broadcast_from_first(self, tensor: tf.Tensor) -> tf.Tensor:
        """The first process's value of a tensor of any shape. Collective."""

    def _broadcast_initial_values(self) -> None:
        """Broadcasts the weights of the first process to all. Collective."""
        variables = [each for each in (*self._values, *self.others) if not lacks_value(each)]

        def broadcast() -> None:
            assign_all(variables, [self._broadcast_from_first(value_of(v)) for v in variables])

        tf.function(broadcast, autograph=False)()

    def _update_of_shards(
        self, spec: TrainingSpec, *, takes_whole_gradients: bool = False
    ) -> ShardedUpdate:
        """The update of `weights`, which are the weights of this trainer from now on. Local.

        With `takes_whole_gradients` they are the full weights, which are gathered before each pass.
        """
        local = [shard.local for shard in self.weights.shards]
        self._values = list(self.weights.full_variables) if takes_whole_gradients else local
        return ShardedUpdate(spec, self.weights, takes_whole_gradients=takes_whole_gradients)

    def _state_of(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
    ) -> NamedState:
        return ShardedState(trainable, others, kinds, self.weights, self.update.sharded_slots)
