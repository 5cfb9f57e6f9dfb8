"""Batch normalization of Keras layers over the global batch.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from isotrain.adapters.common.step_context import CommonStepContext
from isotrain.adapters.keras import private as keras_private


def normalize_globally(layers: Iterable[keras.Layer], step: CommonStepContext) -> None:
    """Lets batch normalizations compute their statistics from the samples of all replicas.

    Args:
        layers: All layers of a model; those that are no batch normalization stay as they are.
        step: Step context of the replica, whose differentiable sums are used.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            keras_private.set_moments(layer, functools.partial(_GlobalMoments, step, layer.axis))


class _GlobalMoments:
    """Mean and variance over the samples of all replicas; see Ioffe and Szegedy (2015), algorithm 1.

    The variance is the mean squared distance from the global mean, which takes a second sum over the replicas
    and loses no digits to cancellation.
    """

    def __init__(
        self, step: CommonStepContext, axis: int, local_moments: keras_private.Moments
    ) -> None:
        self._step = step
        self._axis = axis
        self._local_moments = local_moments

    def __call__(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Mean and variance per feature, shape [features]. Collective.

        Args:
            inputs: Inputs of the layer, shape [batch, ...].
            mask: None, or the entries that count, shape of the inputs without the last axis.
        """
        if self._step.is_alone:
            return self._local_moments(inputs, mask)
        rank = len(inputs.shape)
        axis = self._axis % rank
        reduced = [each for each in range(rank) if each != axis]
        weights = ops.ones_like(inputs) if mask is None else _broadcast(mask, inputs)
        count = self._step.sum(ops.sum(weights, reduced))
        mean = self._step.sum(ops.sum(inputs * weights, reduced)) / count
        shape = [-1 if each == axis else 1 for each in range(rank)]
        distances = ops.square(inputs - ops.reshape(mean, shape)) * weights
        return mean, self._step.sum(ops.sum(distances, reduced)) / count


def _broadcast(mask: Any, inputs: Any) -> Any:
    """The mask as numbers 0 and 1, of the shape and dtype of the inputs."""
    return ops.broadcast_to(ops.expand_dims(ops.cast(mask, inputs.dtype), -1), ops.shape(inputs))
