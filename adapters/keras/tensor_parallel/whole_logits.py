"""Rule by which a spec needs whole logits where these could be cut: its loss, its metrics; no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.plugin import TrainingSpec

SPARSE, DENSE = "sparse_categorical_crossentropy", "categorical_crossentropy"
"""Names of the losses that take the columns of each process."""


def why_whole(spec: TrainingSpec, framework: str) -> str:
    """Reason that the loss of a spec needs whole logits; empty where each process can do with some columns.

    Args:
        spec: Training spec.
        framework: Framework whose loss is used, where the spec has one per framework.
    """
    if spec.objective is not None or spec.updates:
        return "an objective may use them in any way"
    if spec.call is not None:
        return "`call` may use them in any way"
    losses = spec.losses(framework)
    if set(losses) != {None}:
        return "the losses are by output"
    component = choices.resolve_for_framework(losses[None], framework, "loss")
    options = component.options
    if not component.is_reference:
        name = choices.snake_case(keras_names.class_name(component.name, "loss"))
        is_last = options.get("axis", -1) == -1
        if name in (SPARSE, DENSE) and options.get("from_logits") is True and is_last:
            return ""
    return (
        f"the loss, {component.label}, takes whole ones; {SPARSE} and {DENSE} with from_logits: true take"
        " columns"
    )


def named_loss(spec: TrainingSpec, framework: str) -> tuple[str, Mapping[str, Any]]:
    """Name and options of the loss of a spec that does not need whole logits."""
    component = choices.resolve_for_framework(spec.losses(framework)[None], framework, "loss")
    return choices.snake_case(keras_names.class_name(component.name, "loss")), component.options


def gathering_metrics(spec: TrainingSpec) -> list[str]:
    """Names of the metrics of a spec that take whole logits: all but the accuracy."""
    return [
        component.label
        for component in spec.metrics
        if component.name not in keras_names.ACCURACIES
        or component.options
        or component.output is not None
    ]
