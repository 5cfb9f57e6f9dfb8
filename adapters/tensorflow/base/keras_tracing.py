"""What Keras is made to do otherwise while a `tf.function` is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import tensorflow as tf

from isotrain.adapters.common.seeds import seed_offset
from isotrain.adapters.keras import private as keras_private


def random_streams(replica: Callable[[], int]) -> contextlib.AbstractContextManager[None]:
    """Gives each replica random numbers (dropout) of its own in what is traced within it.

    The seeds' states stay equal on all replicas, and replica 0 draws what one replica alone draws.
    """
    return shifted_seeds(lambda: seed_offset_of(replica()))


def seed_offset_of(replica: int, step: int = 0) -> tf.Tensor:
    """By what the seeds of a replica's random layers are moved in a step: shape `[2]`, int64."""
    return tf.constant([seed_offset(replica, step), 0], tf.int64)


def shifted_seeds(shift: Callable[[], tf.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Moves the seeds that random layers draw with in what is traced within it; not their states."""
    return keras_private.shifted_seeds(lambda seed: seed + tf.cast(shift(), seed.dtype))


def local_mean_losses() -> contextlib.AbstractContextManager[None]:
    """Makes Keras losses give the mean over the samples they get in what is traced within it.

    Under a strategy they would divide it by the number of replicas (rounded to float32), while a
    person's own loss function would not.
    """
    return keras_private.local_mean_losses()
