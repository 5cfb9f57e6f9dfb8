"""Sources over map-style data sets: samples by index, one by one or by a list of indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.data.arrays import Array, InputsAndTargets, as_array, as_inputs_and_targets
from isotrain.core.data.pytree import same_kind
from isotrain.core.errors import DataError, unknown_name

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
        self._data = data
        self._inputs = inputs
        self._targets = targets
        _require_samples(len(data))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def column(self, name: str) -> Any:
        """A column of the data set; None if there is none of that name."""
        return self._data[name] if name in getattr(self._data, "column_names", ()) else None

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The selected columns of the samples at `indices` (int64 [batch]), arrays of shape [batch, ...].

        Raises:
            DataError: The data set returned no dict of columns.
        """
        batch = self._data[indices.tolist()]
        if not isinstance(batch, Mapping):
            raise DataError(
                f"{type(self._data).__name__}[[...]]: expected a dict of columns, "
                f"received {type(batch).__name__}."
            )
        return _split_fields(batch, self._inputs, self._targets, _column)


def _split_fields(
    fields: Mapping[str, Any],
    inputs: _Names,
    targets: _Names,
    convert: Callable[[Any, str], Any],
) -> InputsAndTargets:
    """Inputs and targets from named fields, each value converted by `convert(value, name)`."""
    if inputs is None:
        used = [targets] if isinstance(targets, str) else (targets or ())
        inputs = [name for name in fields if name not in used]
    return _select(fields, inputs, convert), (
        None if targets is None else _select(fields, targets, convert)
    )


def _select(
    fields: Mapping[str, Any], names: str | Sequence[str], convert: Callable[[Any, str], Any]
) -> Any:
    if not isinstance(names, str):
        return {name: _select(fields, name, convert) for name in names}
    if names not in fields:
        raise DataError(f"the data set: {unknown_name('column', names, fields)}")
    return convert(fields[names], names)


def _column(values: Any, name: str) -> Array:
    """A column as an array of shape [batch, ...]."""
    if isinstance(values, list):
        return _stack([as_array(value, name) for value in values], range(len(values)), name)
    return as_array(values, name)


class Collator:
    """Makes batches of lists of samples, as `MapStyle` and `sample_stream` describe them."""

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None, inputs: _Names, targets: _Names
    ) -> None:
        """Keeps the function that makes a batch (None: leaves are stacked) and the names of the parts."""
        self._collate = collate
        self._names = inputs, targets

    def __call__(
        self, samples: list[Any], numbers: Sequence[int] | None = None
    ) -> InputsAndTargets:
        """Inputs and targets of the samples, arrays of shape [batch, ...]; errors name their `numbers`."""
        if self._collate is not None:
            return self._inputs_and_targets(self._collate(samples), "the batch of collate_fn")
        numbers = range(len(samples)) if numbers is None else numbers
        pairs = [
            self._inputs_and_targets(sample, f"sample {number}")
            for sample, number in zip(samples, numbers, strict=True)
        ]
        inputs = _collate([pair[0] for pair in pairs], numbers, "inputs")
        if pairs[0][1] is None:
            return inputs, None
        return inputs, _collate([pair[1] for pair in pairs], numbers, "targets")

    def _inputs_and_targets(self, value: Any, name: str) -> InputsAndTargets:
        """Inputs and targets of a sample or a batch."""
        if self._names == (None, None):
            return as_inputs_and_targets(value, name)
        if not isinstance(value, Mapping):
            raise DataError(
                f"{name}: expected a dict, since names of inputs or targets are given, received"
                f" {type(value).__name__}."
            )
        return _split_fields(value, *self._names, lambda field, _: field)


class MapStyle:
    """A source over a map-style data set, with `__len__` and `__getitem__(int)`, as of torch.

    A sample is (inputs, targets), (inputs, targets, sample weight) or inputs alone; each an array, a number,
    or a tuple or dict of them; or it is a dict of all of them, with the names of inputs and targets given
    here. `__getitems__(list)` is used if there is one.

    Attributes:
        notes: Notes for the plan, on what differs from the DataLoader it came from.
        order: Order of the data's own; None for that of the spec.
    """

    order: MakeOrder | None = None

    def __init__(
        self,
        data: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | Sequence[str] | None = None,
    ) -> None:
        """Keeps the data set; reads no sample.

        Args:
            data: The data set; not a loader that already makes batches.
            collate: Function that makes a batch of a list of samples; by default, leaves are stacked.
            inputs: For samples that are dicts: one name, several (then the inputs are a dict), or None for
                all that are not targets.
            targets: For samples that are dicts: one name, several, or None for none.
        """
        self._data = data
        self.notes: list[str] = []
        self._collator = Collator(collate, inputs, targets)
        _require_samples(len(data))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def column(self, name: str) -> Any:
        """An attribute of the data set, or of that of which it is torch's `Subset`; None if there is none."""
        values = getattr(self._data, name, None)
        if values is None and all(hasattr(self._data, each) for each in ("dataset", "indices")):
            entire = getattr(self._data.dataset, name, None)
            return None if entire is None else [entire[index] for index in self._data.indices]
        return values

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The samples at `indices` (int64 [batch]), fetched and stacked to shape [batch, ...]."""
        positions = indices.tolist()
        if hasattr(self._data, "__getitems__"):
            samples = self._data.__getitems__(positions)
        else:
            samples = [self._data[index] for index in positions]
        return self._collator(samples, positions)


def _collate(samples: list[Any], indices: Sequence[int], name: str) -> Any:
    """Stacks the leaves of samples of equal structure, to shape [batch, ...]."""
    first = samples[0]
    if isinstance(first, tuple):
        columns = enumerate(zip(*samples, strict=True))
        stacked = (_collate(list(column), indices, f"{name}[{i}]") for i, column in columns)
        return same_kind(first, stacked)
    if isinstance(first, Mapping):
        return {k: _collate([s[k] for s in samples], indices, f"{name}[{k!r}]") for k in first}
    values = [as_array(s, f"{name} of sample {i}") for s, i in zip(samples, indices, strict=True)]
    return _stack(values, indices, name)


def _stack(values: list[Array], indices: Sequence[int], name: str) -> Array:
    """Stacks arrays of one shape, to shape [batch, ...].

    Raises:
        DataError: Shapes differ.
    """
    for value, index in zip(values, indices, strict=True):
        if value.shape != values[0].shape:
            raise DataError(
                f"{name}: expected samples of one shape, received {values[0].shape} for sample "
                f"{indices[0]} and {value.shape} for sample {index}. Pad or crop them to one shape."
            )
    return np.stack(values)


def _require_samples(length: int) -> None:
    if length < 1:
        raise DataError("the data set is empty: expected at least one sample.")
