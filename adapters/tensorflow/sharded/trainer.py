"""A model on TensorFlow of which each replica keeps a part of every weight and slot."""

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
from isotrain.adapters.keras.sharding import require_shardable
from isotrain.adapters.tensorflow.base.compile import Compute
from isotrain.adapters.tensorflow.base.variables import assign_all, value_of
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.sharded.keras_layers import ShardedLayers
from isotrain.adapters.tensorflow.sharded.modules import ShardedModules
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients, WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import NamedState, canonical_names, native
from isotrain.plugin import DeviceMesh, StateInfo, StateKind, TrainingSpec


class ShardedUpdate(WeightUpdate):
    """Updates the own parts of weights, clipped as the whole of them would be."""

    def __init__(self, spec: TrainingSpec, weights: ShardedWeights) -> None:
        """Makes the optimizer, and slots for the parts.

        Args:
            spec: Names the optimizer.
            weights: In parts.
        """
        super().__init__(spec, weights.variables)
        self._norms = weights.norms
        self._places = {id(part): place for place, part in enumerate(weights.local_shards)}
        optimizer = self._optimizer
        self._global_clipnorm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
        self._bound_of_each, optimizer.clipnorm = optimizer.clipnorm, None
        if isinstance(optimizer, keras.optimizers.Lamb):
            optimizer.update_step = self._lamb

    def sharded_slots(self) -> list[list[Any]]:
        """The slots that lie as weights do: those of one kind after the other, in the weights' order."""
        return list(keras_private.slots_of(self._optimizer).values())

    def apply(self, gradients: Gradients) -> None:
        """Clips and applies gradients of the parts that are already means over the replicas."""
        dense = self.unscaled(gradients)
        if self._bound_of_each:
            factors = self._bound_of_each / tf.maximum(self._norms(dense), self._bound_of_each)
            pairs = zip(dense, tf.unstack(factors), strict=True)
            dense = [each * tf.cast(factor, each.dtype) for each, factor in pairs]
        self.apply_shard(dense, tf.norm(self._norms(dense)) if self._global_clipnorm else None)

    def _lamb(self, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        """Keras' own step, with the norms of the whole weight and of the whole update."""
        lamb, place, dtype = self._optimizer, self._places[id(variable)], variable.dtype
        slots = keras_private.slots_of(lamb)
        mean, square = slots["momentum"][place], slots["velocity"][place]
        step = tf.cast(lamb.iterations + 1, dtype)
        lamb.assign_add(mean, (gradient - mean) * (1 - lamb.beta_1))
        lamb.assign_add(square, (gradient**2 - square) * (1 - lamb.beta_2))
        scale = tf.sqrt(square / (1 - tf.cast(lamb.beta_2, dtype) ** step)) + lamb.epsilon
        update = mean / (1 - tf.cast(lamb.beta_1, dtype) ** step) / scale
        weight, other = tf.unstack(self._norms([variable, update]))
        both = tf.logical_and(weight > 0, other > 0)
        ratio = tf.where(both, tf.math.divide_no_nan(weight, other), 1.0)
        lamb.assign_sub(variable, tf.cast(ratio, dtype) * tf.cast(rate, dtype) * update)


class ShardedTrainer(ReplicaTrainer):
    """Computes with weights that are joined layer by layer, or module by module, and updates the own parts.

    Attributes:
        weights: They.
    """

    weights: ShardedWeights
    update: ShardedUpdate
    _layers: ShardedLayers | ShardedModules

    def __init__(
        self, spec: TrainingSpec, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int
    ) -> None:
        """Builds everything; called by every replica.

        Args:
            spec: What to train.
            communicator: Ties this replica to the others.
            mesh: How parts lie over the replicas.
            unit_bytes: Of weights that are joined together, where layers allow it.
        """
        self._communicator = communicator
        self._mesh = mesh
        self._unit_bytes = unit_bytes
        super().__init__(spec)
        self._compute[True] = self._in_parts(self._compute[True])

    def _build_model(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Any:
        """Layers are computed again by those that join them."""
        return keras_model.build_model(spec.replace(recompute=()), "tensorflow", scope)

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> ShardedUpdate:
        """Takes the weights apart first: there are never slots for all of them."""
        require_shardable(dict(zip(canonical_names(trainable), trainable, strict=True)))
        self._start_alike()
        self.weights = ShardedWeights(trainable, self._communicator, self._mesh)
        self._values = self.weights.local_shards
        is_called = spec.objective is None  # which may call some of its layers
        parted = ShardedLayers if isinstance(self.model, keras.Layer) else ShardedModules
        self._layers = parted(self.model, self.weights, self._unit_bytes, is_called)
        self._layers.recompute(self.model, spec)
        return ShardedUpdate(spec, self.weights)

    def _start_alike(self) -> None:
        """Gives all the weights of replica 0."""
        variables, everyone = [*self._values, *self.others], range(self._communicator.replicas)

        def start() -> None:
            found = [
                self._communicator.broadcast_within(value_of(each), (tuple(everyone),))
                for each in variables
            ]
            assign_all(variables, found)

        tf.function(start, autograph=False)()

    def _state_of(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
    ) -> NamedState:
        return ShardedState(trainable, others, kinds, self.weights, self.update.sharded_slots)

    def _in_parts(self, compute: Compute) -> Compute:
        def computed(inputs: Any, targets: Any) -> tuple[Any, Any]:
            with self._layers.gather_on_read():
                return compute(inputs, targets)

        return computed

    def _loss_denominators(self, micro_batch: MicroBatch) -> tf.Tensor:
        """Whatever the weights are: of those that are elsewhere it sees none."""
        with self._layers.without_numbers():
            return self._compute[False](*micro_batch)[0][1, 1:]

    def trace_unshard(self) -> None:
        """Gives this replica all weights, while this is traced by all."""
        self.weights.trace_unshard(self._unit_bytes)


class ShardedState(NamedState):
    """The state that a replica has: its parts of weights and slots; all weights, while they are here."""

    def __init__(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        kinds: Mapping[StateKind, Callable[[], Mapping[str, Any]]],
        weights: ShardedWeights,
        slots: Callable[[], list[list[Any]]],
    ) -> None:
        """Names variables, as `NamedState` does.

        Args:
            trainable: Weights that are trained.
            others: The other weights.
            kinds: Gives the variables of each other kind by name.
            weights: The trained ones, in parts.
            slots: Gives those of the optimizer: of one kind after the other, in the order of the weights.
        """
        super().__init__(trainable, others, kinds)
        self._sharded_weights = weights
        self._named = list(self._weights["trainable"])
        lying = [weights.variables, *slots()]
        self._places = {id(native(v)): place for each in lying for place, v in enumerate(each)}

    def _variables(self, kinds: Sequence[StateKind]) -> dict[str, tf.Variable]:
        found = super()._variables(kinds)
        if "trainable" in kinds and not self._sharded_weights.is_unsharded:
            found |= dict(zip(self._named, self._sharded_weights.local_shards, strict=True))
        return found

    def describe(self, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        found = self._variables(kinds)
        return {
            name: self._described(info, self._places.get(id(found[name])))
            for name, info in super().describe(kinds).items()
        }

    def _described(self, info: StateInfo, place: int | None) -> StateInfo:
        if place is None:
            return info
        cut, own = self._sharded_weights.shard_specs[place], self._sharded_weights.shard_index
        offset, part = tuple(cut.shard_offset(own)), tuple(cut.shard_shape(own))
        return replace(info, shape=tuple(cut.shape), offset=offset, shard_shape=part)

    def write(self, state: Mapping[str, np.ndarray], place: int | None = None) -> None:
        known = self._variables((*self._weights, *self._kinds))
        super().write({name: self._own(known.get(name), a) for name, a in state.items()}, place)
        if self._sharded_weights.is_unsharded:
            self._sharded_weights.refresh_shards(
                [each for each, n in enumerate(self._named) if n in state]
            )

    def _own(self, variable: tf.Variable | None, array: np.ndarray) -> np.ndarray:
        """Of what lies in parts, the own one, where all of it is given."""
        place = None if variable is None else self._places.get(id(variable))
        if place is None or np.shape(array) != tuple(
            self._sharded_weights.shard_specs[place].shape
        ):
            return array
        own: np.ndarray = self._sharded_weights.local_shard_of(place, array)
        return own
