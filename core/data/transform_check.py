"""Whether a transform works on each sample on its own, as shares of a batch need it."""

from __future__ import annotations

import contextlib
import copy
import random as python_random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isotrain.core.data.arrays import as_array
from isotrain.core.data.pytree import leaves, map_tree
from isotrain.core.data.refusals import TRANSFORM, RefusedError

_ROWS = 32
_TOLERANCE = 1e-4

Rows = dict[str, np.ndarray]


def require_no_mixing(
    transform: Callable[..., Any], parts: tuple[Any, Any], random_of: Callable[[int, int], Any]
) -> None:
    """Calls a transform on samples as a whole and in two parts, of which nothing remains.

    One that draws random numbers of its own gives no sample twice, and cannot be compared: it is let pass.

    Args:
        transform: Gets copies, which it may change in place.
        parts: Inputs and targets of two samples or more.
        random_of: The third argument for the samples from one to another.

    Raises:
        RefusedError: The samples are others.
    """
    _, first = next(leaves(parts[0], "inputs"))
    rows = min(len(first), _ROWS)
    cut = max(1, rows // 3)
    with _global_random_kept():
        own = _copy_of(transform)

        def transformed(start: int, stop: int) -> Rows:
            return _rows(own(*_copied(parts, start, stop), random_of(start, stop)))

        try:
            whole, again = transformed(0, rows), transformed(0, rows)
            one, other = transformed(0, cut), transformed(cut, rows)
        except Exception:  # it takes no parts; what it does wrong with a whole share is said there
            return
    if not any(_differ(whole[name], again[name]) for name in whole) and any(
        _differ(whole[name], np.concatenate([one[name], other[name]])) for name in whole
    ):
        detail = (
            f"it gives other samples for {rows} at once than for {cut} and {rows - cut} of them"
        )
        raise RefusedError(TRANSFORM, detail)


def _copied(parts: tuple[Any, Any], start: int, stop: int) -> tuple[Any, Any]:
    """Copies of some rows, each of the type that the data give."""
    inputs, targets = (
        None if part is None else map_tree(lambda leaf: copy.deepcopy(leaf[start:stop]), part)
        for part in parts
    )
    return inputs, targets


def _rows(found: Any) -> Rows:
    """What a transform returned, as arrays by their paths."""
    return {name: as_array(leaf) for name, leaf in leaves(found, "") if leaf is not None}


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return True
    if one.dtype.kind not in "fiu":
        return not np.array_equal(one, other)
    largest = float(np.nanmax(np.abs(one), initial=0.0))
    return not np.allclose(one, other, _TOLERANCE, _TOLERANCE * largest, equal_nan=True)


def _copy_of(transform: Callable[..., Any]) -> Callable[..., Any]:
    """One whose state may move; the transform itself where that cannot be copied."""
    try:
        return copy.deepcopy(transform)
    except Exception:  # anything may be in its attributes
        return transform


@contextlib.contextmanager
def _global_random_kept() -> Iterator[None]:
    """Has the generators that all code shares go on as if nothing had been drawn."""
    torch = sys.modules.get("torch")
    before = python_random.getstate(), np.random.get_state()
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        python_random.setstate(before[0])
        np.random.set_state(before[1])
        if torch is not None:
            torch.set_rng_state(of_torch)
