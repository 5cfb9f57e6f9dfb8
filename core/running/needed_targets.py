"""Samples without targets where the loss compares predictions with some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.data.by_position import BatchIndexed, MapStyle
from isotrain.core.errors import DataError
from isotrain.core.spec.training_spec import TrainingSpec


def needs_targets(spec: TrainingSpec, framework: str) -> bool:
    """Whether a loss for a framework is one with a name; what a person's own ones need is their affair."""
    return any(not loss.is_reference for loss in spec.losses(framework).values())


def missing_targets_error(source: Any, inputs: Any) -> DataError:
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
