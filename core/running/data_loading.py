"""From a spec's data to the data set of a run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from isotrain.core.data.dataset import DataSet, as_dataset
from isotrain.core.data.parted import class_weighted, split
from isotrain.core.data.sources import stream
from isotrain.core.errors import DataError, IsotrainError
from isotrain.core.spec import references
from isotrain.core.spec.training_spec import TrainingSpec


def load_data(spec: TrainingSpec) -> DataSet:
    """Calls the spec's data function, or takes the data it holds.

    Raises:
        DataError: It is no data set.
    """
    return _as_the_spec_says(load_dataset(spec.data, spec.data_args), spec)


def load_dataset(data: Any, arguments: Mapping[str, Any]) -> DataSet:
    """Calls a data function with its arguments, or takes data as they are.

    Raises:
        DataError: It is no data set.
    """
    found = references.resolve(data)
    is_data = hasattr(found, "__getitem__") and not isinstance(found, type)
    if callable(found) and not is_data:
        function = functools.partial(found, **arguments)
        found = function()
        if isinstance(found, Iterator):  # it can be read once: the function begins each epoch
            found = stream(function)
    elif arguments:
        raise IsotrainError("data_args: they are for a data function, and data is the data itself.")
    return as_dataset(found)


def _as_the_spec_says(data: DataSet, spec: TrainingSpec) -> DataSet:
    """The data with the spec's validation split and class weights."""
    if spec.validation_split is not None:
        if data.validation is not None:
            raise DataError(
                "validation_split: the data have a validation part; leave one of them out."
            )
        data = DataSet(*split(data.train, spec.validation_split))
    if spec.class_weight is not None:
        data = DataSet(class_weighted(data.train, spec.class_weight), data.validation)
    return data
