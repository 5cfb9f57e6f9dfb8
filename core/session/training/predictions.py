"""Predictions of all replicas, gathered and put into the order of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch
from isotrain.core.data.pytree import leaves, map_tree
from isotrain.core.data.sampler import slice_bounds
from isotrain.core.errors import UnsupportedError
from isotrain.core.quantities import counted

_WORD = np.dtype(np.int32)
"""The dtype in which the bytes of any array are gathered: every framework can all-gather it."""


def predict_batch(group: ReplicaGroup, batch: Batch) -> Any:
    """Predicts for a global batch. Collective.

    Args:
        group: The replica group.
        batch: This process's part of the global batch.

    Returns:
        The model's structure of arrays, each of shape `[samples of the global batch, ...]`. Those of slices
        of several widths are padded with zeros to the widest.

    Raises:
        UnsupportedError: An output does not have one row per sample.
    """
    slices = [micro_batches[0] for micro_batches in batch.slices]
    predictions = group.predict([each.inputs for each in slices])
    trees = [as_numpy(group, tree) for tree in predictions]
    for tree, each in zip(trees, slices, strict=True):
        for array in _arrays_of(tree):
            _require_rows(array, max(each.count, 1))
    return _gathered_arrays(group, batch, trees)


def gathered(group: ReplicaGroup, batch: Batch, tensors: Sequence[Any]) -> Any:
    """Gathers what each local replica has for its samples of a global batch. Collective.

    Args:
        group: The replica group.
        batch: This process's part of the global batch.
        tensors: For each local replica a structure of tensors, each of shape `[samples, ...]`.

    Returns:
        The structure with arrays of shape `[samples of the global batch, ...]`.
    """
    return _gathered_arrays(group, batch, [as_numpy(group, tree) for tree in tensors])


def _gathered_arrays(group: ReplicaGroup, batch: Batch, trees: Sequence[Any]) -> Any:
    if batch.varying_widths:
        trees = _widened(group, trees)
    bounds = [slice_bounds(batch.size, group.replicas, rank) for rank in range(group.replicas)]
    counts = [stop - start for start, stop in bounds]
    outputs = [_arrays_of(tree) for tree in trees]
    if len(outputs) < group.replicas:
        outputs = _all_gathered(group, outputs, rows=max(counts))
    global_outputs = [
        np.concatenate([array[:count] for array, count in zip(arrays, counts, strict=True)])
        for arrays in zip(*outputs, strict=True)
    ]
    return _unflattened(trees[0], iter(global_outputs))


def _widened(group: ReplicaGroup, trees: Sequence[Any]) -> list[Any]:
    """Arrays `[samples, ...]` padded with zeros to the largest shape of all replicas. Collective."""
    local = np.array([[n for a in _arrays_of(tree) for n in a.shape[1:]] for tree in trees])
    shared = local.max(0)
    if not group.is_single_process:
        shared = np.array(group.all_reduce_max(shared.astype(float).tolist()), np.int64)
    return [_padded_tree(tree, iter(shared.tolist())) for tree in trees]


def _padded_tree(tree: Any, lengths: Iterator[int]) -> Any:
    """Arrays `[samples, ...]` padded with zeros to lengths of all axes but the first, in order."""
    return _mapped(lambda array: _padded(array, [next(lengths) for _ in array.shape[1:]]), tree)


def _padded(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array `[samples, ...]` with zeros up to a shape of all axes but the first."""
    missing = [(0, length - n) for n, length in zip(array.shape[1:], shape, strict=True)]
    return np.pad(array, [(0, 0), *missing]) if any(map(any, missing)) else array


def as_numpy(group: ReplicaGroup, outputs: Any) -> Any:
    """Copies model outputs, tensors of any shapes in dicts, lists and tuples, to arrays. Local."""
    return _mapped(group.numpy, outputs)


def concatenated(batches: Sequence[Any]) -> Any:
    """Concatenates predictions of consecutive global batches: structures of arrays `[samples, ...]`.

    Those of several widths are padded with zeros to the widest.
    """
    outputs = zip(*(_arrays_of(batch) for batch in batches), strict=True)
    return _unflattened(batches[0], map(_concatenated_arrays, outputs))


def _concatenated_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    shape = [max(lengths) for lengths in zip(*(array.shape[1:] for array in arrays), strict=True)]
    return np.concatenate([_padded(array, shape) for array in arrays])


def _require_rows(array: np.ndarray, expected: int) -> None:
    """Refuses an output that is not of shape `[expected, ...]`: a row for each sample."""
    if array.ndim == 0 or len(array) != expected:
        raise UnsupportedError(
            f"predict: the model gave an output of shape {array.shape} for {counted(expected, 'sample')};"
            " expected a row for each sample, so that the parts of all replicas can be put together."
        )


def _all_gathered(
    group: ReplicaGroup, outputs: list[list[np.ndarray]], rows: int
) -> list[list[np.ndarray]]:
    """The outputs of every replica, `[samples, ...]`, by one all-gather. Collective.

    Each is padded to `rows` rows, so that shapes are equal on all replicas.
    """
    like = [np.empty((rows, *array.shape[1:]), array.dtype) for array in outputs[0]]
    messages = [group.tensor(_packed(arrays, rows)) for arrays in outputs]
    gathered = group.numpy(group.compute(_all_gather, messages)[0])
    return [_unpacked(words, like) for words in gathered]


def _all_gather(replica: Replica, words: Tensor) -> Tensor:
    """Computation that gathers one tensor of each replica: shape `[replicas, *shape]`."""
    return replica.all_gather(words)


def _packed(arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Packs the bytes of arrays, each zero-padded to `rows` rows, into one 1-D int32 array."""
    parts = []
    for array in arrays:
        padded = np.zeros((rows, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        parts.append(padded.tobytes())
    message = b"".join(parts)
    return np.frombuffer(message + bytes(-len(message) % _WORD.itemsize), _WORD)


def _unpacked(words: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Unpacks the arrays of `_packed`; `like` gives shape and dtype of each."""
    message, start, arrays = words.tobytes(), 0, []
    for each in like:
        part = message[start : start + each.nbytes]
        arrays.append(np.frombuffer(part, each.dtype).reshape(each.shape))
        start += each.nbytes
    return arrays


def _arrays_of(tree: Any) -> list[np.ndarray]:
    """The arrays of a structure, flattened in order."""
    return [array for _, array in leaves(tree, "", lists=True) if array is not None]


def _unflattened(tree: Any, arrays: Iterator[np.ndarray]) -> Any:
    """The structure of `tree` with other arrays, of any shapes, in order."""
    return _mapped(lambda _: next(arrays), tree)


def _mapped(function: Callable[[Any], np.ndarray], tree: Any) -> Any:
    """Applies a function to the arrays of a structure, any shapes; None stays None."""
    return map_tree(lambda leaf: None if leaf is None else function(leaf), tree, lists=True)
