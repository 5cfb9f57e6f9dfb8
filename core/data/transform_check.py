"""Check that a transform treats each sample independently, as local batches need it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from isotrain.core.data.arrays import as_array
from isotrain.core.data.pytree import leaves, map_parts
from isotrain.core.data.refusals import TRANSFORM, RefusedError
from isotrain.core.data.sample_seeds import preserved_global_rng

_ROWS = 32
_TOLERANCE = 1e-4

Rows = dict[str, np.ndarray]


def require_no_mixing(
    transform: Callable[..., Any], parts: tuple[Any, Any], random_of: Callable[[int, int], Any]
) -> None:
    """Compares the transform of a batch with that of its two parts; leaves no trace.

    A transform with its own random numbers never repeats a result, and cannot be compared: it passes.

    Args:
        transform: Function that receives copies, which it may change in place.
        parts: Inputs and targets of two or more samples, arrays of shape [samples, ...].
        random_of: Function from the first and last sample to the transform's third argument.

    Raises:
        RefusedError: The results differ.
    """
    _, first_leaf = next(leaves(parts[0], "inputs"))
    rows = min(len(first_leaf), _ROWS)
    cut = max(1, rows // 3)
    with preserved_global_rng():
        copied = _copy_transform(transform)

        def call(start: int, stop: int) -> Rows:
            copies = map_parts(lambda leaf: copy.deepcopy(leaf[start:stop]), parts)
            return _rows(copied(*copies, random_of(start, stop)))

        try:
            whole, repeated = call(0, rows), call(0, rows)
            first, second = call(0, cut), call(cut, rows)
        except Exception:  # it takes no parts; an error on a full local batch is reported there
            return
    if not any(_differ(whole[name], repeated[name]) for name in whole) and any(
        _differ(whole[name], np.concatenate([first[name], second[name]])) for name in whole
    ):
        detail = (
            f"it gives other samples for {rows} at once than for {cut} and {rows - cut} of them"
        )
        raise RefusedError(TRANSFORM, detail)


def _rows(result: Any) -> Rows:
    """The result of a transform as arrays by their paths."""
    return {name: as_array(leaf) for name, leaf in leaves(result, "") if leaf is not None}


def _differ(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether arrays of any shape differ by more than rounding."""
    if first.shape != second.shape:
        return True
    if first.dtype.kind not in "fiu":
        return not np.array_equal(first, second)
    largest = float(np.nanmax(np.abs(first), initial=0.0))
    return not np.allclose(first, second, _TOLERANCE, _TOLERANCE * largest, equal_nan=True)


def _copy_transform(transform: Callable[..., Any]) -> Callable[..., Any]:
    """A copy, so that its state may change; the transform itself where it cannot be copied."""
    try:
        return copy.deepcopy(transform)
    except Exception:  # anything may be in its attributes
        return transform
