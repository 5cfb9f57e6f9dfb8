"""Re-batching: turns the batches of a stream, of any sizes, into global batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from isotrain.core.data.arrays import InputsAndTargets, as_array, as_inputs_and_targets
from isotrain.core.data.pytree import map_parts, map_tree, part_leaves, same_kind
from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

IsOnDevice = Callable[[Any], bool]


def never_on_device(leaf: Any) -> bool:
    """False for everything: all leaves are converted to arrays."""
    return False


def global_batches(
    batches: Iterable[Any],
    size: int,
    samples: int | None = None,
    *,
    samples_before: int = 0,
    first: int = 0,
    is_on_device: IsOnDevice = never_on_device,
) -> Iterator[tuple[InputsAndTargets, int]]:
    """Yields (inputs, targets) of `size` samples with their number; the last may have fewer.

    A batch of the right size is passed on unchanged; others are split and concatenated.

    Args:
        batches: Batches of one epoch, each (inputs, targets), (inputs, targets, sample weights) or inputs
            alone; arrays of shape [n, ...].
        size: Number of samples in a global batch.
        samples: Number of samples in the epoch; None if the batches never end.
        samples_before: Number of samples of the epoch in earlier batches.
        first: Index of the first sample to yield, a multiple of `size`.
        is_on_device: Whether to pass on a leaf unchanged, in a batch of the right size; all others are
            converted to arrays.

    Raises:
        DataError: The stream has fewer or more samples, or a batch differs in structure.
    """
    buffer: list[InputsAndTargets] = []
    rows = 0
    read = samples_before
    for batch in batches:
        parts = _arrays(batch, is_on_device)
        length = _batch_size(parts)
        skipped = min(max(first - read, 0), length)
        read += length
        if samples is not None and read > samples:
            break
        if skipped == length:
            continue
        rows += length - skipped
        if length != size:
            parts = _arrays(parts)
        buffer.append(_slice_rows(parts, skipped, length) if skipped else parts)
        if rows == size:
            yield _concatenate_batches(buffer), size
            buffer, rows = [], 0
        elif rows > size:
            joined = _concatenate_batches(buffer)
            for start in range(0, rows - size + 1, size):
                yield _slice_rows(joined, start, start + size), size
            buffer = [_slice_rows(joined, rows - rows % size, rows)] if rows % size else []
            rows %= size
    if samples is not None and read != samples:
        raise DataError(
            f"the stream gave {read}{' or more' if read > samples else ''} samples in an epoch, expected"
            f" {samples}: it must give equally many in every epoch."
        )
    if rows:
        yield _concatenate_batches(buffer), rows


def fingerprint(parts: InputsAndTargets) -> int:
    """CRC-32 of all arrays, of any shape."""
    checksum = 0
    for _, array in part_leaves(parts):
        checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, checksum)
    return checksum


def next_sample(batch: Any) -> int:
    """The fingerprint of the first sample of a batch of a stream."""
    return fingerprint(_slice_rows(_arrays(batch), 0, 1))


def as_batch(batch: Any, rows: int) -> InputsAndTargets:
    """A batch of so many samples, as arrays `[rows, ...]`.

    Raises:
        DataError: It has another number of samples.
    """
    parts = _arrays(batch)
    if (length := _batch_size(parts)) != rows:
        raise DataError(
            f"a batch of the stream has {counted(length, 'row')}, expected {rows}, one for each sample."
        )
    return parts


def _arrays(batch: Any, is_on_device: IsOnDevice = never_on_device) -> InputsAndTargets:
    """A batch with its leaves converted to arrays, except those on the device."""

    def convert(leaf: Any, name: str) -> Any:
        return leaf if is_on_device(leaf) else as_array(leaf, name)

    inputs, targets = as_inputs_and_targets(batch, "a batch of the stream")
    inputs = map_tree(partial(convert, name="inputs"), inputs)
    return inputs, None if targets is None else map_tree(partial(convert, name="targets"), targets)


def _batch_size(parts: InputsAndTargets) -> int:
    """The number of samples in a batch.

    Raises:
        DataError: It is not equal for all arrays, or 0.
    """
    lengths = {name: len(array) if array.ndim else None for name, array in part_leaves(parts)}
    length = next(iter(lengths.values()))
    if not length or set(lengths.values()) != {length}:
        raise DataError(
            "a batch of the stream: expected arrays with equally many rows, one per sample, received"
            f" {lengths}."
        )
    return length


def _slice_rows(parts: InputsAndTargets, start: int, stop: int) -> InputsAndTargets:
    """Views of the rows from `start` to `stop` of every array."""
    return map_parts(lambda array: array[start:stop], parts)


def _concatenate_batches(batches: list[InputsAndTargets]) -> InputsAndTargets:
    """Batches as one; a single one is not copied.

    Raises:
        DataError: They differ in structure, or in more than the first axis of shapes.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        inputs = _concatenate([parts[0] for parts in batches])
        if batches[0][1] is None:
            return inputs, None
        return inputs, _concatenate([parts[1] for parts in batches])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"the stream's batches differ in more than their number of samples: {error}"
        ) from error


def _concatenate(trees: list[Any]) -> Any:
    """Concatenates the leaves of pytrees of one structure along the first axis."""
    first = trees[0]
    if isinstance(first, tuple):
        return same_kind(first, (_concatenate([t[i] for t in trees]) for i in range(len(first))))
    if isinstance(first, dict):
        return {key: _concatenate([t[key] for t in trees]) for key in first}
    return np.concatenate(trees)
