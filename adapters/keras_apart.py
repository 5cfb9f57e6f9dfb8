"""Weights of a Keras model that can be taken apart.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import keras

from isotrain.plugin import SpecError


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


def require_apt(weights: Mapping[str, keras.Variable]) -> None:
    """Refuses trainable weights of which a part cannot be kept and updated alone.

    Args:
        weights: By name.

    Raises:
        SpecError: There are such.
    """
    bad = [name for name, each in weights.items() if each.constraint is not None or not each.shape]
    if bad:
        raise SpecError(
            f"strategy sharded: {', '.join(bad)}: stage=3 takes no weight apart that is a single number"
            " or has a constraint. Take stage 1 or 2."
        )
    types = {str(each.dtype) for each in weights.values()}
    if not types <= {"float32", "float64"} or len(types) != 1:
        raise SpecError(
            "strategy sharded: stage=3 takes trainable weights of one type, float32 or float64; those of"
            f" this model are {', '.join(sorted(types)) or 'none'}. Take stage 1 or 2."
        )
