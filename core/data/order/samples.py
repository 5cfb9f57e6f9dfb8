"""The samples that an order is made for, and the columns of the data by which it chooses them."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

_MAX_SAMPLES = 2**36


@dataclass(frozen=True)
class Columns:
    """The columns of a data set by name, each with one entry per sample; read when they are used.

    Attributes:
        source: The data set.
    """

    source: Any

    def __getitem__(self, name: str) -> Any:
        """A column: an array [samples], or a sequence.

        Raises:
            DataError: There is none of that name, or it does not have one entry per sample.
        """
        find = getattr(self.source, "column", None)
        values = getattr(self.source, name, None) if find is None else find(name)
        if values is None or not hasattr(values, "__len__"):
            raise DataError(
                f"order: the data set has no column {name!r}. Columns are inputs, targets and the names of"
                " arrays; columns of a data set of Hugging Face; and attributes of a map-style data set, such"
                " as targets. A callable of the columns may give an array [samples] instead."
            )
        if len(values) != len(self.source):
            raise DataError(
                f"order: column {name!r} has {len(values)} entries for {counted(len(self.source), 'sample')};"
                " expected one for each."
            )
        return values


@dataclass(frozen=True)
class Samples:
    """The samples that an order is made for, and how they are cut into global batches.

    Attributes:
        length: Number of samples in the data set.
        global_batch_size: Samples per step over all replicas.
        seed: The spec's seed.
        drop_remainder: Whether to leave out a last, smaller global batch of an epoch.
        columns: Columns of the data.
        shuffle: Whether each epoch is to have its own order.
    """

    length: int
    global_batch_size: int
    seed: int
    drop_remainder: bool
    columns: Columns
    shuffle: bool = True

    @classmethod
    def of(
        cls,
        source: Sized,
        *,
        global_batch_size: int,
        seed: int,
        drop_remainder: bool,
        shuffle: bool = True,
    ) -> Samples:
        """The samples of a source by position.

        Raises:
            DataError: The source has no plausible length.
        """
        length, columns = length_of(source), Columns(source)
        return cls(length, global_batch_size, seed, drop_remainder, columns, shuffle)


def length_of(source: Sized) -> int:
    """Number of samples of a source, or of local batches of a stream, within a plausible range.

    Raises:
        DataError: `len` fails, or is implausibly large.
    """
    try:
        length = len(source)
    except (OverflowError, ValueError, TypeError) as error:
        raise DataError(f"data: len() of it fails: {type(error).__name__}: {error}.") from None
    if length > _MAX_SAMPLES:
        raise DataError(
            f"data: its length is {counted(length, 'sample')}; expected at most {_MAX_SAMPLES:,}. Is"
            " `__len__` right?"
        )
    return length


Column = str | Callable[[Columns], Any]
"""The name of a column, or a function from the columns to an array [samples]."""


def values_of(column: Column, data: Samples, field: str, kinds: str = "biuf") -> NDArray[Any]:
    """A value for each sample, shape [samples]: a number, or of other `kinds` of NumPy dtypes.

    Raises:
        DataError: It is no array of these of this shape; `field` of the spec has the column.
    """
    values = np.asarray(_read(column, data))
    if values.ndim > 1 and values.shape == (data.length, 1):
        values = values[:, 0]
    if values.shape != (data.length,) or values.dtype.kind not in kinds:
        raise DataError(
            f"{field}: expected one number for each of {counted(data.length, 'sample')}, received"
            f" {values.dtype} of shape {list(values.shape)}."
        )
    return values


def lengths_of(column: Column, data: Samples, field: str) -> NDArray[np.int64]:
    """The length of each sample, int64 [samples], of a column of lengths or of entries that have one."""
    entries = _read(column, data)
    if hasattr(entries[0], "__len__"):
        entries = [len(entry) for entry in entries]
    lengths = values_of(lambda _: entries, data, field)
    if lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise DataError(f"{field}: expected lengths, whole numbers of 0 or more.")
    return lengths.astype(np.int64)


def _read(column: Column, data: Samples) -> Any:
    return data.columns[column] if isinstance(column, str) else column(data.columns)
