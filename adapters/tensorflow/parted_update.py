"""How a TensorFlow replica updates its parts of weights: as data-parallel runs update the whole of them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters import keras_private
from isotrain.adapters.tensorflow.parted_weights import ShardedWeights
from isotrain.adapters.tensorflow.weight_update import Gradients, WeightUpdate
from isotrain.plugin import TrainingSpec


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
        self._bound, optimizer.global_clipnorm = optimizer.global_clipnorm, None
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
        self.apply_shard(dense, tf.norm(self._norms(dense)) if self._bound else None)

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
