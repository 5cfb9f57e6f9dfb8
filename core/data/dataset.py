"""The data set of a run: samples to train on and to validate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isotrain.core.data.sources import as_source


@dataclass(frozen=True)
class DataSet:
    """The value of a spec's `data`: samples to train on, and samples to validate on.

    Attributes:
        train: Anything that `as_source` accepts; None for loops that make all batches by `session.batch`.
        validation: Anything that `as_source` accepts; None without validation.
    """

    train: Any = None
    validation: Any = None


def as_dataset(value: Any) -> DataSet:
    """A `DataSet` of sources, from a `DataSet` or from anything that `as_source` accepts (train only).

    Raises:
        DataError: The value is no data set; the message lists what is accepted.
    """
    if not isinstance(value, DataSet):
        return DataSet(as_source(value))
    parts = (value.train, value.validation)
    return DataSet(*(None if part is None else as_source(part) for part in parts))
