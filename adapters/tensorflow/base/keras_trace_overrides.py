"""Changes of Keras' behaviour while a `tf.function` is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import tensorflow as tf

from isotrain.adapters.common.seeds import seed_offset
from isotrain.adapters.keras import private as keras_private


def random_streams(replica: Callable[[], int]) -> contextlib.AbstractContextManager[None]:
    """Context in which each replica draws random numbers (dropout) of its own in what is traced.

    The seeds' states stay equal on all replicas, and replica 0 draws what a single-replica run draws.

    Args:
        replica: Returns the index of the replica that is being traced.
    """
    return shifted_seeds(lambda: seed_offset_of(replica()))


def seed_offset_of(replica: int, step: int = 0) -> tf.Tensor:
    """Offset of the seeds of a replica's random layers in a step: shape `[2]`, int64."""
    return tf.constant([seed_offset(replica, step), 0], tf.int64)


def shifted_seeds(shift: Callable[[], tf.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Context in which random layers draw with offset seeds in what is traced; the seeds' states stay.

    Args:
        shift: Returns the offset, shape `[2]`.
    """
    return keras_private.shifted_seeds(lambda seed: seed + tf.cast(shift(), seed.dtype))


def local_mean_losses() -> contextlib.AbstractContextManager[None]:
    """Context in which Keras losses return the mean over the samples they get, in what is traced.

    Under a strategy they would divide it by the number of replicas (rounded to float32), while a custom
    loss function would not.
    """
    return keras_private.local_mean_losses()
