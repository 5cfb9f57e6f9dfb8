"""Sources over map-style data sets: samples by index, one by one or by a list of indices."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isotrain.core.data.arrays import (
    Array,
    ArraySource,
    InputsAndTargets,
    as_array,
)
from isotrain.core.data.collate import (
    NO_SAMPLES,
    Collate,
    Collator,
    as_mapping,
    is_structure,
    split_fields,
    stack,
)
from isotrain.core.data.mixture import Joined, Mixture
from isotrain.core.data.pytree import map_parts, unweighted
from isotrain.core.data.sample_seeds import CURRENT, only_rows
from isotrain.core.data.streaming.sample_streams import length_by_position
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.data.worker_settings import WorkerSettings
from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from isotrain.core.data.order.order import MakeOrder
    from isotrain.core.data.sampler import Indices

_Names = str | Sequence[str] | None


class BatchIndexed:
    """A source over data with `__len__` whose `data[[i, j, ...]]` is a dict of columns (Hugging Face)."""

    def __init__(
        self,
        data: Any,
        inputs: str | Sequence[str] | None = None,
        targets: str | Sequence[str] | None = None,
    ) -> None:
        """Selects columns.

        Args:
            data: The data set. If it has `with_format` and no format yet, its NumPy format is used,
                which keeps the dtypes that lists of Python numbers would lose.
            inputs: Name of one column (an array), names of several (a dict of arrays), or None for all
                columns that are not targets.
            targets: Name of one column, names of several, or None for none.
        """
        unformatted = getattr(data, "format", {}).get("type") is None
        if hasattr(data, "with_format") and unformatted:
            data = data.with_format("numpy")
        self.data = data
        self._inputs = inputs
        self._targets = targets
        _require_samples(len(data))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.data)

    def column(self, name: str) -> Any:
        """A column of the data set; None if there is none of that name."""
        return self.data[name] if name in getattr(self.data, "column_names", ()) else None

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The selected columns of the samples at `indices` (int64 [batch]), arrays of shape [batch, ...].

        Raises:
            DataError: The data set returned no dict of columns.
        """
        batch = _columns(self.data, indices.tolist())
        return split_fields(batch, self._inputs, self._targets, _column)


def _column(values: Any, name: str) -> Array:
    """A column as an array of shape [batch, ...]."""
    if isinstance(values, list):
        return stack([as_array(value, name) for value in values], range(len(values)), name, name)
    return as_array(values, name)


class MapStyle:
    """A source over a map-style data set, with `__len__` and `__getitem__(int)`, as of torch.

    A sample is (inputs, targets), (inputs, targets, sample weight) or inputs alone; each an array, a number,
    a text, or a tuple, dict or dataclass of them; or it is a dict or dataclass of all of them, with the names
    of inputs and targets given here. `__getitems__(list)` is used if there is one.

    Attributes:
        data: The data set.
        workers: Settings of worker processes, where it came from a DataLoader that has some.
        order: Order of the data's own; None for that of the spec.
    """

    order: MakeOrder | None = None

    def __init__(
        self,
        data: Any,
        collate: Collate | None = None,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | Sequence[str] | None = None,
    ) -> None:
        """Keeps the data set; reads no sample.

        Args:
            data: The data set; not a loader that already makes batches.
            collate: Function that makes a batch of a list of samples, or padding; by default, leaves are
                stacked.
            inputs: For samples that are dicts: one name, several (then the inputs are a dict), or None for
                all that are not targets.
            targets: For samples that are dicts: one name, several, or None for none.
        """
        self.data = data
        self.workers: WorkerSettings | None = None
        self._collator = Collator(collate, inputs, targets)
        self._length = length_by_position(data)
        _require_samples(self._length)

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    @property
    def collates(self) -> bool:
        """Whether slices are made one by one of single samples, since their shapes may differ."""
        return self._collator.is_custom

    def column(self, name: str) -> Any:
        """A column of the data set; None if there is none of that name.

        It is an attribute, also of the data set of which this is torch's `Subset`; or, of a list of samples,
        the part of each of that name, `inputs` or `targets`.
        """
        if isinstance(self.data, _Rows):
            return self.data.column(name)
        if isinstance(self.data, list):
            return _part_of_each(self.data, name)
        values = getattr(self.data, name, None)
        if values is None and all(hasattr(self.data, each) for each in ("dataset", "indices")):
            entire = getattr(self.data.dataset, name, None)
            return None if entire is None else [entire[index] for index in self.data.indices]
        return values

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The samples at `indices` (int64 [batch]), fetched and stacked to shape [batch, ...]."""
        positions = indices.tolist()
        return self._collator(self._samples(positions), positions)

    def _samples(self, positions: list[int]) -> list[Any]:
        """The samples at some positions, as the data set gives them."""
        if hasattr(self.data, "__getitems__"):
            samples: list[Any] = self.data.__getitems__(positions)
            return samples
        seeds = CURRENT.get()
        each = positions if seeds is None else seeds.one_by_one(positions)
        return [self.data[index] for index in each]


def _part_of_each(samples: list[Any], name: str) -> list[Any] | None:
    """A part of each sample of a list, by its name or as inputs or targets; None if they have none."""
    first = samples[0]
    if isinstance(first, tuple):
        parts = {"inputs": 0, "targets": 1}
        number = parts.get(name, len(first))
        return [sample[number] for sample in samples] if number < len(first) else None
    if not is_structure(first):
        return samples if name == "inputs" else None
    tables = [as_mapping(sample, name) for sample in samples]
    return [table[name] for table in tables] if name in tables[0] else None


class _Rows:
    """Samples of a source that has arrays, columns or parts of them."""

    def __init__(self, source: ArraySource | BatchIndexed | Mixture) -> None:
        self._source = source

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._source)

    def column(self, name: str) -> Any:
        """A column of the source; None if there is none of that name."""
        return self._source.column(name)


class _ArrayRows(_Rows):
    """Samples of arrays: (inputs, targets), (inputs, targets, sample weight) or (inputs,)."""

    _source: ArraySource

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """One sample, arrays of shape [...]."""
        parts = self._source.inputs, self._source.targets
        inputs, targets = map_parts(lambda array: array[index], parts)
        targets, weights = unweighted(targets)
        return tuple(part for part in (inputs, targets, weights) if part is not None)


class _ColumnRows(_Rows):
    """Samples of columns, as dicts."""

    _source: BatchIndexed

    def __getitems__(self, positions: list[int]) -> list[dict[str, Any]]:
        """Several samples."""
        columns = _columns(self._source.data, positions)
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


class _MixedRows(_Rows):
    """Samples of a mixture."""

    _source: Mixture

    def __getitems__(self, positions: list[int]) -> list[Any]:
        """Several samples."""
        samples = []
        for row, position in enumerate(positions):
            part, index = self._source.located(position)
            with only_rows([row]):
                samples += part._samples([index])
        return samples


def _columns(data: Any, positions: list[int]) -> Mapping[str, Any]:
    """The columns of the samples at some positions.

    Raises:
        DataError: The data set returned no dict.
    """
    batch = data[positions]
    if not isinstance(batch, Mapping):
        raise DataError(
            f"{type(data).__name__}[[...]]: expected a dict of columns, "
            f"received {type(batch).__name__}."
        )
    return batch


def with_collate(source: Any, collate: Collate) -> MapStyle | Joined | BatchStream:
    """A source of the same samples, whose batches `collate` makes.

    Raises:
        DataError: The source gives batches, not samples, or has a collate function.
    """
    collated: MapStyle
    if isinstance(source, ArraySource):
        collated = MapStyle(_ArrayRows(source), collate)
        collated.order = source.order
        return collated
    if isinstance(source, Joined):
        return source.changed(lambda part: with_collate(part, collate))
    if isinstance(source, Mixture):
        return _collated_mixture(source, collate)
    if isinstance(source, BatchIndexed):
        rows = _ColumnRows(source)
        return MapStyle(rows, collate, inputs=source._inputs, targets=source._targets)
    if isinstance(source, BatchStream):
        return source.with_collate(collate)
    if not isinstance(source, MapStyle):
        raise DataError(NO_SAMPLES.format(type(source).__name__))
    collated = copy.copy(source)
    collated._collator = source._collator.replaced(collate)
    return collated


def _collated_mixture(source: Mixture, collate: Collate) -> MapStyle:
    """A source of the samples of a mixture, of which those of one slice may be from several data sets."""
    parts = source.changed(lambda part: with_collate(part, collate))
    inputs, targets = parts.located(0)[0]._collator.names
    collated = MapStyle(_MixedRows(parts), collate, inputs=inputs, targets=targets)
    collated.order = source.order
    return collated


def _require_samples(length: int) -> None:
    if length < 1:
        raise DataError("the data set is empty: expected at least one sample.")
