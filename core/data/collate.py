"""Collation: batches of lists of samples, padded where their lengths differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from isotrain.core.data.arrays import (
    ALLOCATE,
    Array,
    InputsAndTargets,
    as_array,
    as_inputs_and_targets,
)
from isotrain.core.data.pytree import Weighted, same_kind
from isotrain.core.errors import DataError, unknown_name

Names: TypeAlias = str | Sequence[str] | None
"""Names of the inputs or of the targets among the fields of a sample."""
Collate: TypeAlias = "Callable[[list[Any]], Any] | Padding"
"""A function or padding that makes a batch of single samples."""


@dataclass(frozen=True)
class Padding:
    """Padding of parts of samples, along their first axis, to the length of their slice.

    Attributes:
        values: Value to pad with, by the name of the part: a key of a dict or `inputs`, `targets` and
            `sample_weights`; `inputs[0]` is the first of a tuple.
        length: Length to pad to; None for that of the longest sample of the slice.
        multiple: Number of which the length of the longest sample is rounded up to a multiple.
    """

    values: Mapping[str, float]
    length: int | None = None
    multiple: int = 1

    def stack(self, arrays: list[Array], indices: Sequence[int], name: str, part: str) -> Array:
        """Stacks arrays `[n, ...]` of a part that this pads to one of shape `[batch, length, ...]`.

        Args:
            arrays: Arrays, one of each sample.
            indices: Index of each sample in the data set, for messages.
            name: Path of the part, for messages.
            part: Name of the part in `values`.

        Raises:
            DataError: A sample is longer than the fixed length, or shapes differ besides that.
        """
        longest, index = max(
            (len(array), index) for array, index in zip(arrays, indices, strict=True)
        )
        length = self.length or -(-longest // self.multiple) * self.multiple
        if longest > length:
            raise DataError(
                f"collate: {part} of sample {index} has length {longest}, and all are padded to {length}."
                " Raise `to`, or crop the samples."
            )
        _require_one_shape([(length, *array.shape[1:]) for array in arrays], indices, name, part)
        dtype = np.result_type(*{array.dtype for array in arrays})
        shape = len(arrays), length, *arrays[0].shape[1:]
        padded = ALLOCATE.get()(shape, dtype)
        np.copyto(padded, self.values[part], casting="unsafe")
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        return padded


NO_SAMPLES = (
    "collate: it makes batches of single samples, and {} gives batches. Give a data set with __len__ and"
    " __getitem__ (isotrain.sources.MapStyle of a list of samples), a stream of samples"
    " (isotrain.sources.sample_stream), or leave collate out."
)


class Collator:
    """Makes batches of lists of samples, as `MapStyle` and `sample_stream` describe them.

    Attributes:
        names: Names of inputs and of targets, for samples that are dicts.
    """

    def __init__(self, collate: Collate | None, inputs: Names, targets: Names) -> None:
        """Keeps what makes a batch (None: leaves are stacked) and the names of the parts."""
        self._collate = collate
        self.names = inputs, targets

    def replaced(self, collate: Collate) -> Collator:
        """A collator of the same parts with another way to make batches.

        Raises:
            DataError: This one has a function of the user's own.
        """
        if self.is_custom:
            raise DataError(
                "collate: the data have a collate function already, as of a DataLoader. Leave one of the two"
                " out."
            )
        return Collator(collate, *self.names)

    @property
    def pads(self) -> bool:
        """Whether samples are padded."""
        return isinstance(self._collate, Padding)

    @property
    def is_custom(self) -> bool:
        """Whether batches are padded or made by a function that is not torch's own, which stacks."""
        return self._collate is not None and not _is_stacking(self._collate)

    def __call__(
        self, samples: list[Any], numbers: Sequence[int] | None = None
    ) -> InputsAndTargets:
        """Inputs and targets of the samples, arrays of shape [batch, ...]; errors name their `numbers`."""
        if callable(self._collate):
            return self._inputs_and_targets(self._collate(samples), "the batch of collate")
        numbers = range(len(samples)) if numbers is None else numbers
        if self.names != (None, None):
            return self._stacked_fields(samples, numbers, self._collate)
        pairs = [
            as_inputs_and_targets(sample, f"sample {number}")
            for sample, number in zip(samples, numbers, strict=True)
        ]
        inputs = stacked([pair[0] for pair in pairs], numbers, "inputs", self._collate)
        if pairs[0][1] is None:
            return inputs, None
        return inputs, stacked([pair[1] for pair in pairs], numbers, "targets", self._collate)

    def _stacked_fields(
        self, samples: list[Any], numbers: Sequence[int], padding: Padding | None
    ) -> InputsAndTargets:
        """Inputs and targets of samples that are dicts; fields that are neither are not stacked."""
        tables = [
            as_mapping(sample, f"sample {number}")
            for sample, number in zip(samples, numbers, strict=True)
        ]
        used: list[str] = []
        split_fields(tables[0], *self.names, lambda _, name: used.append(name))
        columns = [{name: table.get(name) for name in used} for table in tables]
        batch = stacked(columns, numbers, "sample", padding)
        return split_fields(batch, *self.names, lambda field, _: field)

    def _inputs_and_targets(self, batch: Any, name: str) -> InputsAndTargets:
        """Inputs and targets of a batch that a function has made; names are those of a dict."""
        if self.names == (None, None) or not is_structure(batch):
            return as_inputs_and_targets(batch, name)
        return split_fields(as_mapping(batch, name), *self.names, lambda field, _: field)


def _is_stacking(collate: Any) -> bool:
    """Whether a function that makes batches is torch's own, which stacks."""
    return getattr(collate, "__module__", "").startswith("torch.")


def split_fields(
    fields: Mapping[str, Any],
    inputs: Names,
    targets: Names,
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


def stacked(
    samples: list[Any],
    indices: Sequence[int],
    name: str,
    padding: Padding | None = None,
    part: str | None = None,
) -> Any:
    """Stacks the leaves of samples of equal structure, to shape [batch, ...].

    Parts of dicts and dataclasses that are None in all samples are left out.

    Args:
        samples: Samples, or the same part of each: arrays, numbers or texts, in tuples, dicts and
            dataclasses.
        indices: Index of each sample in the data set, for messages.
        name: Path of the part, for messages.
        padding: Padding of parts whose lengths differ.
        part: Name of the part for `padding`; None for the path.

    Raises:
        DataError: Samples differ in structure, or in a shape that is not padded.
    """
    part = part or name
    first = samples[0]
    if isinstance(first, tuple):
        sizes = [len(sample) if isinstance(sample, tuple) else None for sample in samples]
        _require_alike(sizes, indices, name, "the number of parts")
        names = [f"{part}[{i}]" for i in range(len(first))]
        if isinstance(first, Weighted):
            names = [part, "sample_weights"]
        parts = (
            stacked([sample[i] for sample in samples], indices, f"{name}[{i}]", padding, names[i])
            for i in range(len(first))
        )
        return same_kind(first, parts)
    if is_structure(first):
        tables = [as_mapping(sample, name) for sample in samples]
        fields = dict.fromkeys(field for table in tables for field in table)
        columns = {field: [table.get(field) for table in tables] for field in fields}
        return {
            field: stacked(column, indices, f"{name}[{field!r}]", padding, str(field))
            for field, column in columns.items()
            if not _all_missing(column, indices, f"{name}[{field!r}]")
        }
    arrays = [as_array(s, f"{name} of sample {i}") for s, i in zip(samples, indices, strict=True)]
    if padding is not None and part in padding.values and all(a.ndim for a in arrays):
        return padding.stack(arrays, indices, name, part)
    return stack(arrays, indices, name, part)


def is_structure(sample: Any) -> bool:
    """Whether a sample has named parts: a dict, or an instance of a dataclass."""
    is_instance = dataclasses.is_dataclass(sample) and not isinstance(sample, type)
    return is_instance or isinstance(sample, Mapping)


def as_mapping(sample: Any, name: str) -> Mapping[str, Any]:
    """The named parts of a sample.

    Raises:
        DataError: It has none.
    """
    if isinstance(sample, Mapping):
        return sample
    if not is_structure(sample):
        raise DataError(
            f"{name}: expected a dict or a dataclass, whose names are needed, received"
            f" {type(sample).__name__}."
        )
    return {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}


def _all_missing(column: list[Any], indices: Sequence[int], name: str) -> bool:
    """Whether a part is None in all samples.

    Raises:
        DataError: It is None in some of them only.
    """
    missing = [value is None for value in column]
    if any(missing):
        _require_alike(missing, indices, name, "whether it is None or left out")
    return missing[0]


def _require_alike(values: list[Any], indices: Sequence[int], name: str, subject: str) -> None:
    """Refuses samples that differ in something, such as the number of parts."""
    for value, index in zip(values, indices, strict=True):
        if value != values[0]:
            raise DataError(
                f"{name}: samples {indices[0]} and {index} differ in {subject}. Give all samples the same"
                " parts, or set `collate` in the spec to a function that makes a batch of a list of samples."
            )


def stack(values: list[Array], indices: Sequence[int], name: str, part: str) -> Array:
    """Stacks arrays of one shape, to shape [batch, ...].

    Args:
        values: Arrays, one of each sample.
        indices: Index of each sample in the data set, for messages.
        name: Path of the part, for messages.
        part: Name of the part in `collate`.

    Raises:
        DataError: Shapes differ.
    """
    _require_one_shape([value.shape for value in values], indices, name, part)
    dtype = np.result_type(*{value.dtype for value in values})
    return np.stack(values, out=ALLOCATE.get()((len(values), *values[0].shape), dtype))


def _require_one_shape(
    shapes: list[tuple[int, ...]], indices: Sequence[int], name: str, part: str
) -> None:
    """Refuses samples of different shapes."""
    for shape, index in zip(shapes, indices, strict=True):
        if shape != shapes[0]:
            raise DataError(
                f"{name}: expected samples of one shape, received {shapes[0]} for sample "
                f"{indices[0]} and {shape} for sample {index}. Pad or crop them to one shape: for"
                f" lengths that differ, `collate: {{pad: {{{part}: 0}}}}` in the spec pads each slice."
            )
