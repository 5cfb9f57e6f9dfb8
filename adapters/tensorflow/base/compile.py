"""TensorFlow's compiler, XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from isotrain.adapters.keras import private as keras_private

Compute = Callable[[Any, Any], tuple[Any, Any]]
"""`compute(inputs, targets)`: loss and predictions of a slice."""


def compiled(compute: Compute) -> Compute:
    """What gives the same, and its gradients, by XLA. Called while a replica is traced.

    Each local replica has a translation of its own, for each draws random numbers of its own.
    """
    functions: dict[Any, Callable[..., Any]] = {}

    def translated(inputs: Any, targets: Any) -> tuple[Any, Any]:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = int(tf.get_static_value(replica))
        if own not in functions:
            functions[own] = tf.function(
                _with_masks(compute), jit_compile=True, autograph=False, reduce_retracing=False
            )
        loss, predictions, masks = functions[own](inputs, targets)
        for part, mask in zip(tf.nest.flatten(predictions), masks, strict=True):
            if mask is not None:
                keras_private.set_mask(part, mask)
        return loss, predictions

    return translated


def _with_masks(compute: Compute) -> Callable[[Any, Any], Any]:
    """Gives the masks of the predictions too: what hangs on a tensor does not leave a function."""

    def computed(inputs: Any, targets: Any) -> Any:
        loss, predictions = compute(inputs, targets)
        return loss, predictions, [keras_private.mask_of(p) for p in tf.nest.flatten(predictions)]

    return computed
