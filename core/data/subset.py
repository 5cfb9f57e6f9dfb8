"""Sources made of others: a part of one, and one whose classes count differently."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.data.arrays import (
    Array,
    ArraySource,
    InputsAndTargets,
    as_array,
    as_inputs_and_targets,
)
from isotrain.core.data.pytree import Weighted, map_tree
from isotrain.core.data.sources import AnySource, ShardedStream, Source
from isotrain.core.data.streams import BatchStream
from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices


@dataclass(frozen=True)
class _Range:
    """Samples of a source that follow each other."""

    source: Source
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def gather(self, indices: Indices) -> InputsAndTargets:
        return self.source.gather(indices + self.start)


def split(source: AnySource, fraction: float) -> tuple[Source, Source]:
    """The samples before the last part, and the last part, in the source's own order.

    Args:
        source: With samples by position.
        fraction: How much the last part has of them, as in Keras.

    Raises:
        DataError: It is a stream, or one of the parts would be empty.
    """
    if isinstance(source, BatchStream | ShardedStream):
        raise DataError(
            "validation_split: a stream has no last part before it is read. Give it as"
            " isotrain.DataSet(train, validation)."
        )
    length = len(source)
    first = math.floor(length * (1.0 - fraction))
    if not 0 < first < length:
        raise DataError(
            f"validation_split: {fraction} of {length} samples leaves {first} to train on and"
            f" {length - first} to validate on; expected one or more of each."
        )
    return _part(source, 0, first), _part(source, first, length)


def _part(source: Source, start: int, stop: int) -> Source:
    if not isinstance(source, ArraySource):
        return _Range(source, start, stop)
    inputs, targets = (
        None if tree is None else map_tree(lambda array: array[start:stop], tree)
        for tree in (source.inputs, source.targets)
    )
    return ArraySource(inputs, targets)


@dataclass(frozen=True)
class _ClassWeighted:
    """Samples of a source, with weights by their classes."""

    source: Source
    weights: Mapping[int, float]

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: Indices) -> InputsAndTargets:
        return _with_weights(self.source.gather(indices), self.weights)


def class_weighted(source: AnySource, weights: Mapping[int, float]) -> AnySource:
    """The same samples, with weights by their classes.

    Args:
        source: Its targets are classes, or one-hot.
        weights: By class; others have 1.

    Raises:
        DataError: It shards itself; or targets are no classes, or have weights.
    """
    if isinstance(source, ShardedStream):
        raise DataError(
            "class_weight: a stream that shards itself must give sample weights itself."
        )
    if isinstance(source, BatchStream):
        return source.changed(functools.partial(_weighted_batch, weights))
    if isinstance(source, ArraySource):
        return ArraySource(*_with_weights((source.inputs, source.targets), weights))
    return _ClassWeighted(source, weights)


def _weighted_batch(weights: Mapping[int, float], batch: Any) -> InputsAndTargets:
    return _with_weights(as_inputs_and_targets(batch, "a batch of the stream"), weights)


def _with_weights(parts: InputsAndTargets, weights: Mapping[int, float]) -> InputsAndTargets:
    inputs, targets = parts
    if targets is None or isinstance(targets, tuple | Mapping):
        raise DataError(
            "class_weight: expected one array of classes as targets, and no sample weights beside it; got"
            f" {type(targets).__name__}. For several outputs, give (inputs, targets, sample weights)."
        )
    return inputs, Weighted(targets, _weights_of(as_array(targets, "targets"), weights))


def _weights_of(targets: Array, weights: Mapping[int, float]) -> Array:
    """The weight of each sample, float64.

    Raises:
        DataError: The targets are neither whole numbers nor one-hot.
    """
    classes = _classes(targets)
    known = np.ones(classes.shape)
    for number, weight in weights.items():
        known[classes == number] = weight
    return known


def _classes(targets: Array) -> Array:
    """The class of each place: whole numbers themselves, or where in the last axis of other numbers the 1 is.

    By their type alone, and not their values: a share of a batch must be read as the whole is.
    """
    if targets.ndim > 1 and targets.shape[-1] == 1:
        return _whole(targets[..., 0])
    if targets.ndim < 2 or targets.dtype.kind in "iub":
        return _whole(targets)
    if not (np.isin(targets, (0, 1)).all() and (targets.sum(-1) == 1).all()):
        raise DataError(
            f"class_weight: targets of type {targets.dtype} with several numbers for a sample are one-hot;"
            " got a row without a single 1. Give classes as integers, or (inputs, targets, sample weights)."
        )
    found: Array = targets.argmax(-1)
    return found


def _whole(targets: Array) -> Array:
    if targets.dtype.kind not in "iub" and not np.equal(targets, np.round(targets)).all():
        raise DataError(
            "class_weight: expected targets that are classes, as whole numbers or one-hot; got other numbers."
            " Give (inputs, targets, sample weights) instead."
        )
    return targets
