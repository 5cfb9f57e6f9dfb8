"""Batches of any sizes, re-cut to global batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from isotrain.core.data.arrays import InputsAndTargets, as_array, as_inputs_and_targets
from isotrain.core.data.pytree import leaves, map_tree, same_kind
from isotrain.core.errors import DataError

IsOnDevice = Callable[[Any], bool]


def never_on_device(leaf: Any) -> bool:
    """Has everything made an array."""
    return False


def global_batches(
    batches: Iterable[Any],
    size: int,
    samples: int,
    *,
    given: int = 0,
    first: int = 0,
    stays: IsOnDevice = never_on_device,
) -> Iterator[tuple[InputsAndTargets, int]]:
    """Yields (inputs, targets) of `size` samples, and the rest of the epoch at last.

    A batch that has the right size already is passed on as it is; others are cut and joined.

    Args:
        batches: of one epoch, each (inputs, targets), (inputs, targets, sample weights) or inputs alone.
        size: of a global batch.
        samples: what the epoch is to have in all.
        given: how many of them were in batches before these.
        first: the first that is wanted, a multiple of `size`.
        stays: whether something is passed on as it is, if it has the right size; else it is made an array.

    Raises:
        DataError: It has fewer or more, or a batch is not as the others.
    """
    held: list[InputsAndTargets] = []
    rows = 0
    for batch in batches:
        parts = _arrays(batch, stays)
        length = _rows(parts)
        passed = min(max(first - given, 0), length)
        given += length
        if given > samples:
            break
        if passed == length:
            continue
        rows += length - passed
        if length != size:
            parts = _arrays(parts)
        held.append(_cut(parts, passed, length) if passed else parts)
        if rows == size:
            yield _joined(held), size
            held, rows = [], 0
        elif rows > size:
            whole = _joined(held)
            for start in range(0, rows - size + 1, size):
                yield _cut(whole, start, start + size), size
            held = [_cut(whole, rows - rows % size, rows)] if rows % size else []
            rows %= size
    if given != samples:
        raise DataError(
            f"the stream gave {given}{' or more' if given > samples else ''} samples in an epoch, expected"
            f" {samples}: it must give equally many in every epoch."
        )
    if rows:
        yield _joined(held), rows


def fingerprint(parts: InputsAndTargets) -> int:
    """A checksum of all arrays: 32 bits."""
    found = 0
    for _, array in _leaves(parts):
        found = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, found)
    return found


def next_sample(batch: Any) -> int:
    """The fingerprint of the first sample of a batch of a stream."""
    return fingerprint(_cut(_arrays(batch), 0, 1))


def _arrays(batch: Any, stays: IsOnDevice = never_on_device) -> InputsAndTargets:
    def made(leaf: Any, name: str) -> Any:
        return leaf if stays(leaf) else as_array(leaf, name)

    inputs, targets = as_inputs_and_targets(batch, "a batch of the stream")
    inputs = map_tree(partial(made, name="inputs"), inputs)
    return inputs, None if targets is None else map_tree(partial(made, name="targets"), targets)


def _leaves(parts: InputsAndTargets) -> list[tuple[str, Any]]:
    found = [*leaves(parts[0], "inputs")]
    return found if parts[1] is None else [*found, *leaves(parts[1], "targets")]


def _rows(parts: InputsAndTargets) -> int:
    """The samples of a batch.

    Raises:
        DataError: Its arrays do not have equally many.
    """
    lengths = {name: len(array) if array.ndim else None for name, array in _leaves(parts)}
    length = next(iter(lengths.values()))
    if not length or set(lengths.values()) != {length}:
        raise DataError(
            "a batch of the stream: expected arrays with equally many rows, one per sample, got"
            f" {lengths}."
        )
    return length


def _cut(parts: InputsAndTargets, start: int, stop: int) -> InputsAndTargets:
    inputs, targets = (
        None if part is None else map_tree(lambda array: array[start:stop], part) for part in parts
    )
    return inputs, targets


def _joined(held: list[InputsAndTargets]) -> InputsAndTargets:
    """All of them as one; no copy where it is one already.

    Raises:
        DataError: They are not arrays of one structure and shape.
    """
    if len(held) == 1:
        return held[0]
    try:
        inputs = _concatenated([parts[0] for parts in held])
        if held[0][1] is None:
            return inputs, None
        return inputs, _concatenated([parts[1] for parts in held])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"the stream's batches differ in more than their number of samples: {error}"
        ) from error


def _concatenated(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, tuple):
        return same_kind(first, (_concatenated([t[i] for t in trees]) for i in range(len(first))))
    if isinstance(first, dict):
        return {key: _concatenated([t[key] for t in trees]) for key in first}
    return np.concatenate(trees)
