"""Samples without targets where the loss compares predictions with some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isotrain.core.data.by_position import BatchIndexed, MapStyle
from isotrain.core.errors import DataError
from isotrain.core.spec.training_spec import TrainingSpec


def needs_targets(spec: TrainingSpec) -> bool:
    """Whether a loss of the spec is one with a name; what those of the person's own need is their affair."""
    return any(isinstance(name, str) and ":" not in name for name in _names(spec.loss))


def _names(losses: Any) -> Iterator[Any]:
    if isinstance(losses, Mapping):
        for each in losses.values():
            yield from _names(each)
    elif losses is not None:
        yield losses.name


def no_targets(source: Any, inputs: Any) -> DataError:
    """What to say of samples that have inputs only.

    Args:
        source: What they come from.
        inputs: Of a batch of them.
    """
    told = "data: the samples have no targets, with which the loss compares the predictions."
    if not isinstance(inputs, Mapping) or not isinstance(source, BatchIndexed | MapStyle):
        return DataError(f"{told} Give pairs (inputs, targets).")
    names = ", ".join(map(repr, inputs))
    return DataError(
        f"{told} Each is a dict of {names}: say which of them are the targets, as in"
        f" isotrain.sources.{type(source).__name__}(data, inputs=..., targets=...)."
    )
