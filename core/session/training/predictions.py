"""What the replicas predict, put together in the order of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from isotrain.core.contracts.replica import Replica, Tensor
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch
from isotrain.core.data.pytree import leaves, map_tree
from isotrain.core.data.sampler import slice_bounds
from isotrain.core.errors import UnsupportedError

_WORD = np.dtype(np.int32)
"""What travels between replicas: the bits of any type, in one that every framework gathers."""


def predict_batch(group: ReplicaGroup, batch: Batch) -> Any:
    """Predicts for a global batch; called by every process with its part of it.

    Returns:
        Of each of the model's outputs an array of shape `[samples of the global batch, ...]`.

    Raises:
        UnsupportedError: An output has no row for each sample.
    """
    pieces = [own[0] for own in batch.slices]
    given = group.predict([piece.inputs for piece in pieces])
    trees = [_mapped(group.numpy, tree) for tree in given]
    for tree, piece in zip(trees, pieces, strict=True):
        for array in _arrays_of(tree):
            _require_rows(array, max(piece.count, 1))
    bounds = [slice_bounds(batch.size, group.replicas, each) for each in range(group.replicas)]
    counts = [stop - start for start, stop in bounds]
    outputs = [_arrays_of(tree) for tree in trees]
    if len(outputs) < group.replicas:
        outputs = _gathered(group, outputs, rows=max(counts))
    whole = [
        np.concatenate([array[:count] for array, count in zip(arrays, counts, strict=True)])
        for arrays in zip(*outputs, strict=True)
    ]
    return _filled(trees[0], iter(whole))


def concatenated(batches: Sequence[Any]) -> Any:
    """The predictions of one global batch after the other as those of all samples."""
    outputs = zip(*(_arrays_of(batch) for batch in batches), strict=True)
    return _filled(batches[0], (np.concatenate(arrays) for arrays in outputs))


def _require_rows(array: np.ndarray, expected: int) -> None:
    if array.ndim == 0 or len(array) != expected:
        raise UnsupportedError(
            f"predict: the model gave an output of shape {array.shape} for {expected} samples; expected a"
            " row for each sample, so that the parts of all replicas can be put together."
        )


def _gathered(
    group: ReplicaGroup, outputs: list[list[np.ndarray]], rows: int
) -> list[list[np.ndarray]]:
    """Every replica's outputs, in one exchange.

    Args:
        group: Its replicas exchange.
        outputs: Of each replica here.
        rows: To which each output is filled up, so that those of all replicas have one shape.
    """
    like = [np.empty((rows, *array.shape[1:]), array.dtype) for array in outputs[0]]
    messages = [group.tensor(_words(arrays, rows)) for arrays in outputs]
    everyone = group.numpy(group.compute(_from_all, messages)[0])
    return [_arrays(words, like) for words in everyone]


def _from_all(replica: Replica, words: Tensor) -> Tensor:
    return replica.all_gather(words)


def _words(arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """The bits of arrays, each filled up to so many rows."""
    parts = []
    for array in arrays:
        filled = np.zeros((rows, *array.shape[1:]), array.dtype)
        filled[: len(array)] = array
        parts.append(filled.tobytes())
    message = b"".join(parts)
    return np.frombuffer(message + bytes(-len(message) % _WORD.itemsize), _WORD)


def _arrays(words: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Undoes `_words` for arrays of these types and shapes."""
    message, start, found = words.tobytes(), 0, []
    for each in like:
        part = message[start : start + each.nbytes]
        found.append(np.frombuffer(part, each.dtype).reshape(each.shape))
        start += each.nbytes
    return found


def _arrays_of(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree, in order."""
    return [array for _, array in leaves(tree, "", lists=True) if array is not None]


def _filled(tree: Any, arrays: Iterator[np.ndarray]) -> Any:
    """A tree of the same structure with other arrays."""
    return _mapped(lambda _: next(arrays), tree)


def _mapped(function: Callable[[Any], np.ndarray], tree: Any) -> Any:
    """A tree with what a function makes of its arrays; where there is None, the model gives nothing."""
    return map_tree(lambda leaf: None if leaf is None else function(leaf), tree, lists=True)
