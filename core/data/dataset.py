"""What a spec's `data` gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isotrain.core.data.sources import as_source


@dataclass(frozen=True)
class DataSet:
    """What a spec's `data` gives: the samples to train on, and those to evaluate on."""

    train: Any
    validation: Any = None


def as_dataset(value: Any) -> DataSet:
    """A `DataSet` of sources, from a `DataSet` or from what `as_source` accepts (then train only).

    Raises:
        DataError: lists what is accepted.
    """
    if not isinstance(value, DataSet):
        return DataSet(as_source(value))
    validation = None if value.validation is None else as_source(value.validation)
    return DataSet(as_source(value.train), validation)
