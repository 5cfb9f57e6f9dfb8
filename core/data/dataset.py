"""The data set of a run: samples to train on and to validate on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.data.sources import as_source
from isotrain.core.errors import DataError


@dataclass(frozen=True)
class DataSet:
    """The value of a spec's `data`: samples to train on, and samples to validate on.

    Attributes:
        train: Anything that `as_source` accepts; None for loops that make all batches by `session.batch`.
        validation: Anything that `as_source` accepts; None without validation.
        validation_sets: Further named sets to validate on, whose metrics are `validation_NAME_loss`, ...
    """

    train: Any = None
    validation: Any = None
    validation_sets: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_validation(self) -> dict[str, Any]:
        """The data to validate on by the prefix of their metrics: `validation_` and `validation_NAME_`."""
        main = {} if self.validation is None else {"validation_": self.validation}
        return main | {f"validation_{name}_": part for name, part in self.validation_sets.items()}


def changed(data: DataSet, change: Callable[[Any], Any]) -> DataSet:
    """The data set with a function applied to each of its parts."""
    train, validation = (
        None if part is None else change(part) for part in (data.train, data.validation)
    )
    sets = {name: change(part) for name, part in data.validation_sets.items()}
    return DataSet(train, validation, sets)


def as_dataset(value: Any) -> DataSet:
    """A `DataSet` of sources, from a `DataSet` or from anything that `as_source` accepts (train only).

    Raises:
        DataError: The value is no data set; the message lists what is accepted.
    """
    if not isinstance(value, DataSet):
        return DataSet(as_source(value))
    names = [name for name in value.validation_sets if not isinstance(name, str) or not name]
    if names:
        raise DataError(f"validation_sets: expected names that are text, received {names[0]!r}.")
    return changed(value, as_source)
