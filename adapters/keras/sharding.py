"""Weights of a Keras model that can be taken apart.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from isotrain.adapters.common import sharding


@contextlib.contextmanager
def named_like(path: str) -> Iterator[str]:
    """Within it, a variable that is given the name that comes of this has a weight's path, and so its slots.

    Args:
        path: Of the weight.
    """
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as within:
        for scope in scopes:
            within.enter_context(keras.name_scope(scope))
        yield name


def require_shardable(weights: Mapping[str, Any]) -> None:
    """Refuses trainable weights of which a part cannot be kept and updated alone.

    Args:
        weights: Variables of Keras or TensorFlow, by name.

    Raises:
        SpecError: There are such.
    """
    undivided = [name for name, each in weights.items() if each.constraint or not each.shape]
    types = {keras.backend.standardize_dtype(each.dtype) for each in weights.values()}
    sharding.require_shardable(undivided, types)
