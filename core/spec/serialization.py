"""A spec as plain values that another interpreter makes the same spec of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isotrain.core.errors import PlanError
from isotrain.core.spec import import_strings
from isotrain.core.spec.field_types import Component
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.validation import SpecModel


def as_plain(spec: TrainingSpec) -> dict[str, Any]:
    """Gives the spec's plain values.

    Raises:
        PlanError: It holds what can only be told by name, and is not found again by that name.
    """
    stuck = list(_stuck(spec, ""))
    if stuck:
        raise PlanError(
            f"{', '.join(stuck)}: given as an object, which another interpreter cannot be told. Give"
            f" {import_strings.SYNTAX}, or a function of a module that it can import too."
        )
    return spec.to_dict()


def _stuck(value: Any, path: str) -> Iterator[str]:
    """Names the fields that no text can hold."""
    parts = _parts(value)
    if parts is not None:
        for name, part in parts.items():
            yield from _stuck(part, f"{path}.{name}" if path else name)
    elif value is None or isinstance(value, str | int | float):
        return
    elif not (callable(value) and import_strings.is_importable(value)):
        yield path


def _parts(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, SpecModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Component):
        return value.fields
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): part for index, part in enumerate(value)}
    return None
