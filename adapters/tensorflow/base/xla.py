"""Compilation of the forward pass and loss by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from isotrain.adapters.keras import private as keras_private

Compute = Callable[[Any, Any], tuple[Any, Any]]
"""`compute(inputs, targets)`: loss and predictions of a micro-batch."""


def compiled(compute: Compute) -> Compute:
    """Compiles a loss computer, and its gradients, by XLA. Called while a replica is traced.

    Each local replica has a compiled function of its own, because each draws random numbers of its own.
    """
    functions: dict[Any, Callable[..., Any]] = {}

    def compute_compiled(inputs: Any, targets: Any) -> tuple[Any, Any]:
        in_sync_group = tf.distribute.get_replica_context().replica_id_in_sync_group
        replica_id = int(tf.get_static_value(in_sync_group))
        if replica_id not in functions:
            functions[replica_id] = tf.function(
                _with_masks(compute), jit_compile=True, autograph=False, reduce_retracing=False
            )
        loss, predictions, masks = functions[replica_id](inputs, targets)
        for prediction, mask in zip(tf.nest.flatten(predictions), masks, strict=True):
            if mask is not None:
                keras_private.set_mask(prediction, mask)
        return loss, predictions

    return compute_compiled


def _with_masks(compute: Compute) -> Callable[[Any, Any], Any]:
    """Returns the masks of the predictions too: attributes of a tensor do not leave a `tf.function`."""

    def compute_with_masks(inputs: Any, targets: Any) -> Any:
        loss, predictions = compute(inputs, targets)
        return loss, predictions, [keras_private.mask_of(p) for p in tf.nest.flatten(predictions)]

    return compute_with_masks
