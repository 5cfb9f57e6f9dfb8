"""Batch normalization of Keras layers over the global batch, or over ghost batches.

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
from isotrain.plugin import SpecError


def normalize_globally(layers: Iterable[keras.Layer], step: CommonStepContext) -> None:
    """Lets batch normalizations compute their statistics from the samples of all replicas.

    Args:
        layers: All layers of a model; those that are no batch normalization stay as they are.
        step: Step context of the replica, whose differentiable sums are used.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            keras_private.set_moments(layer, functools.partial(_GlobalMoments, step, layer.axis))


def normalize_ghost_batches(layers: Iterable[keras.Layer], step: CommonStepContext) -> None:
    """Lets batch normalizations compute statistics of each ghost batch: Hoffer et al. (2017), section 3.

    Args:
        layers: All layers of a model; those that are no batch normalization stay as they are.
        step: Step context of the replica, which knows its ghost batches.

    Raises:
        SpecError: A layer sums its statistics over the replicas itself.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            if layer.synchronized:
                raise SpecError(
                    f"batch_norm: ghost: {layer.path} has synchronized=True, which sums over the replicas."
                    " Leave one of the two out."
                )
            layer.call = _GhostCall(layer, step)


def is_local(layer: keras.layers.BatchNormalization) -> bool:
    """Whether a batch normalization computes its statistics from the samples of its replica."""
    return not (keras_private.has_set_moments(layer) or isinstance(layer.call, _GhostCall))


class _GhostCall:
    """Call of a batch normalization that normalizes over each ghost batch of this replica.

    The moving statistics become the mean, by samples, of what each ghost batch would make of them. So their
    mean over the replicas is the same for any number of these.
    """

    def __init__(self, layer: keras.layers.BatchNormalization, step: CommonStepContext) -> None:
        self._layer = layer
        self._step = step
        self._local_call = layer.call

    def __call__(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalized inputs, of their shape. Local.

        Args:
            inputs: Inputs of the layer, shape [batch, ...].
            training: Whether statistics are those of the inputs.
            mask: None, or the entries that count, shape of the inputs without the last axis.
        """
        if not (training and self._layer.trainable) or self._step.is_alone:
            return self._local_call(inputs, training=training, mask=mask)
        moving = keras_private.weights_updated_by(self._layer)
        values = [(each, each.value) for each in self._layer.variables]
        results, moved = [], [ops.zeros_like(each) for each in moving]
        for rows in self._step.ghost_batches(inputs.shape[0]):
            ghost_mask = None if mask is None else mask[rows]
            with keras.StatelessScope(values) as scope:
                results.append(self._local_call(inputs[rows], training=True, mask=ghost_mask))
            fraction = (rows.stop - rows.start) / inputs.shape[0]
            after = [scope.get_current_value(each) for each in moving]
            moved = [total + fraction * each for total, each in zip(moved, after, strict=True)]
        for variable, total in zip(moving, moved, strict=True):
            variable.assign(total)
        return ops.concatenate(results)


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
