"""Codec: nested values that the user's function returns as plain JSON, with their NumPy arrays beside it.

Without pickle; tuples become lists. `pytree.encode_tree` is the one for trees of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.errors import IsotrainError

_ARRAY = "__array__"


def encode_value(value: Any) -> tuple[Any, list[np.ndarray]]:
    """Encodes a value of JSON types and NumPy arrays, of any shapes and dtypes.

    Returns:
        The value as plain JSON, and its arrays.

    Raises:
        IsotrainError: Something in it has another type.
    """
    arrays: list[np.ndarray] = []
    return _encode_value(value, arrays), arrays


def decode_value(plain: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Inverse of `encode_value`; the arrays keep shape and dtype."""
    return decode_value_from(plain, {array_name(i): array for i, array in enumerate(arrays)})


def decode_value_from(plain: Any, archive: Mapping[str, np.ndarray]) -> Any:
    """Inverse of `encode_value`, with arrays of any shape by name (`array_name`), as in an `.npz` file."""
    if isinstance(plain, dict):
        if set(plain) == {_ARRAY}:
            return archive[plain[_ARRAY]]
        return {key: decode_value_from(part, archive) for key, part in plain.items()}
    if isinstance(plain, list):
        return [decode_value_from(part, archive) for part in plain]
    return plain


def array_name(index: int) -> str:
    """Name of an array of an encoded value."""
    return f"a{index}"


def _encode_value(value: Any, arrays: list[np.ndarray]) -> Any:
    """JSON form of a value; its arrays, of any shape and dtype, are appended to `arrays`.

    Raises:
        IsotrainError: A value is of another type.
    """
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY: array_name(len(arrays) - 1)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): _encode_value(part, arrays) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_value(part, arrays) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise IsotrainError(
        f"the function returned {type(value).__name__!r}. What it returns travels back between"
        " processes: use numbers, text, None, NumPy arrays, and lists or dicts of these"
        " (float(loss) makes a number of a loss)."
    )
