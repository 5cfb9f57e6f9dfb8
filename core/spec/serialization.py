"""Serialization of a spec as JSON values, from which another interpreter loads the same spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isotrain.core.errors import PlanError
from isotrain.core.spec import import_strings
from isotrain.core.spec.field_types import Component
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.validation import SpecModel


def as_plain(spec: TrainingSpec) -> dict[str, Any]:
    """The spec as JSON values.

    Raises:
        PlanError: A field is an object that cannot be imported by its name.
    """
    unserializable = list(_unserializable_fields(spec, ""))
    if unserializable:
        raise PlanError(
            f"{', '.join(unserializable)}: expected {import_strings.SYNTAX}, or a function that other"
            " processes can import; received an object, which cannot be sent to another interpreter."
        )
    return spec.to_dict()


def _unserializable_fields(value: Any, path: str) -> Iterator[str]:
    """Paths of the fields whose values cannot be written as text."""
    parts = _parts(value)
    if parts is not None:
        for name, part in parts.items():
            yield from _unserializable_fields(part, f"{path}.{name}" if path else name)
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
