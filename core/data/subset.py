"""Sources derived from another: a split for validation, class weights, and repeated samples."""

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
from isotrain.core.data.order.samples import Columns
from isotrain.core.data.pytree import Weighted, map_parts
from isotrain.core.data.sources import AnySource, ShardedStream, Source
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

if TYPE_CHECKING:
    from isotrain.core.data.order.order import MakeOrder
    from isotrain.core.data.sampler import Indices


@dataclass(frozen=True)
class _Range:
    """Consecutive samples of a source."""

    source: Source
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def gather(self, indices: Indices) -> InputsAndTargets:
        return self.source.gather(indices + self.start)

    def column(self, name: str) -> Any:
        """The entries of a column."""
        return Columns(self.source)[name][self.start : self.stop]


def split(source: AnySource, fraction: float) -> tuple[Source, Source]:
    """Splits a source in two, in its order: the last fraction of its samples is to validate on.

    Raises:
        DataError: The source is a stream or has an order of its own, or one of the parts would be empty.
    """
    if getattr(source, "order", None) is not None:
        raise DataError(
            "validation_split: the data have an order of their own, which draws from all samples. Split them"
            " first, and give both parts as isotrain.DataSet(train, validation)."
        )
    if isinstance(source, BatchStream | ShardedStream):
        raise DataError(
            "validation_split: a stream has no last part before it is read. Give two streams as"
            " isotrain.DataSet(train, validation)."
        )
    length = len(source)
    first = math.floor(length * (1.0 - fraction))
    if not 0 < first < length:
        raise DataError(
            f"validation_split: {fraction} of {counted(length, 'sample')} leaves {first} to train on and"
            f" {length - first} to validate on; expected one or more of each."
        )
    return _part(source, 0, first), _part(source, first, length)


def _part(source: Source, start: int, stop: int) -> Source:
    if not isinstance(source, ArraySource):
        return _Range(source, start, stop)
    parts = source.inputs, source.targets
    return ArraySource(*map_parts(lambda array: array[start:stop], parts))


@dataclass(frozen=True)
class _ClassWeighted:
    """A source with sample weights by class."""

    source: Source
    weights: Mapping[int, float]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def order(self) -> MakeOrder | None:
        """Order of the data's own."""
        return getattr(self.source, "order", None)

    def gather(self, indices: Indices) -> InputsAndTargets:
        return _with_weights(self.source.gather(indices), self.weights)

    def column(self, name: str) -> Any:
        """The entries of a column."""
        return Columns(self.source)[name]


@dataclass(frozen=True)
class Repeating:
    """A source of which positions p, p + length, p + 2 * length, ... are the same sample."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: Indices) -> InputsAndTargets:
        return self.source.gather(indices % len(self.source))


def class_weighted(source: AnySource, weights: Mapping[int, float]) -> AnySource:
    """A source of the same samples with sample weights by class.

    Args:
        source: A source whose targets are classes, or one-hot.
        weights: Weight of each class; other classes have weight 1.

    Raises:
        DataError: The source shards itself; or targets are no classes, or already have weights.
    """
    if isinstance(source, ShardedStream):
        raise DataError(
            "class_weight: a stream that shards itself must give sample weights itself."
        )
    if isinstance(source, BatchStream):
        return source.changed(functools.partial(_weighted_batch, weights))
    if isinstance(source, ArraySource):
        result = ArraySource(*_with_weights((source.inputs, source.targets), weights))
        result.order = source.order
        return result
    return _ClassWeighted(source, weights)


def _weighted_batch(weights: Mapping[int, float], batch: Any) -> InputsAndTargets:
    return _with_weights(as_inputs_and_targets(batch, "a batch of the stream"), weights)


def _with_weights(parts: InputsAndTargets, weights: Mapping[int, float]) -> InputsAndTargets:
    inputs, targets = parts
    if targets is None or isinstance(targets, tuple | Mapping):
        raise DataError(
            "class_weight: expected one array of classes as targets, without sample weights, received"
            f" {type(targets).__name__}. For several outputs, give (inputs, targets, sample weights)."
        )
    return inputs, Weighted(targets, _sample_weights(as_array(targets, "targets"), weights))


def _sample_weights(targets: Array, weights: Mapping[int, float]) -> Array:
    """The weight of each sample, float64, of the shape of the classes: whole numbers, or one-hot."""
    classes = _classes(targets)
    sample_weights = np.ones(classes.shape)
    for number, weight in weights.items():
        sample_weights[classes == number] = weight
    return sample_weights


def _classes(targets: Array) -> Array:
    """Classes as whole numbers: the targets themselves, or the argmax of one-hot targets.

    Decided by dtype and shape alone, not by values: a local batch must be read as the global batch is.

    Args:
        targets: Classes, shape [samples, ...] or [samples, ..., 1]; or floats, one-hot in the last axis.
    """
    if targets.ndim > 1 and targets.shape[-1] == 1:
        return _require_whole_numbers(targets[..., 0])
    if targets.ndim < 2 or targets.dtype.kind in "iub":
        return _require_whole_numbers(targets)
    if not (np.isin(targets, (0, 1)).all() and (targets.sum(-1) == 1).all()):
        raise DataError(
            f"class_weight: targets of type {targets.dtype} with several numbers for a sample are one-hot;"
            " received a row without a single 1. Give classes as integers, or (inputs, targets, sample"
            " weights)."
        )
    classes: Array = targets.argmax(-1)
    return classes


def _require_whole_numbers(targets: Array) -> Array:
    """The targets, of any shape.

    Raises:
        DataError: They are no whole numbers.
    """
    if targets.dtype.kind not in "iub" and not np.equal(targets, np.round(targets)).all():
        raise DataError(
            "class_weight: expected targets that are classes, as whole numbers or one-hot; received other"
            " numbers. Give (inputs, targets, sample weights) instead."
        )
    return targets
