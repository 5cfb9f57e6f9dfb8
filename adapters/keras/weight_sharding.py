"""Sharding of a Keras model's weights: checks, and variable paths.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from isotrain.adapters.common import weight_sharding


@contextlib.contextmanager
def named_like(path: str) -> Iterator[str]:
    """Context in which a variable created with the yielded name gets a weight's path.

    Optimizer state of a shard is thereby named like that of the full weight.

    Args:
        path: Path of the weight, such as `dense/kernel`.
    """
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        yield name


def require_shardable(weights: Mapping[str, Any]) -> None:
    """Refuses trainable weights that cannot be sharded: scalars, those with a constraint, mixed dtypes.

    Args:
        weights: Variables of Keras or TensorFlow, by name.

    Raises:
        SpecError: Some weights, or their dtypes, cannot be sharded.
    """
    unshardable = [name for name, each in weights.items() if each.constraint or not each.shape]
    types = {keras.backend.standardize_dtype(each.dtype) for each in weights.values()}
    weight_sharding.require_shardable(unshardable, types)
