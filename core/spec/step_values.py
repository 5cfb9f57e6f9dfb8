"""Values of the steps of a run: numbers that objectives get, constant or by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from isotrain.core.spec import import_strings
from isotrain.core.spec.field_types import Count, Number, Reference, require_name
from isotrain.core.spec.validation import BRANCH, ExpectedText, SpecModel


class LinearValue(SpecModel, json_schema_extra=require_name):
    """A value that changes linearly from one number to another, and stays there."""

    name: Literal["linear"] = "linear"
    start: Number = Field(description="Value of step 0.")
    end: Number = Field(description="Value from step `steps` on.")
    steps: Count = Field(description="Number of steps of the change.")

    def __call__(self, step: int) -> float:
        """Value of a step, from 0."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


def _branch(value: Any) -> str:
    if isinstance(value, Mapping | LinearValue):
        return f"{BRANCH}linear"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{BRANCH}number" if is_number else f"{BRANCH}function"


StepValue = Annotated[
    Annotated[Number, Tag(f"{BRANCH}number")]
    | Annotated[LinearValue, Tag(f"{BRANCH}linear")]
    | Annotated[Reference, Tag(f"{BRANCH}function")],
    ExpectedText("a number, {name: linear, start: ..., end: ..., steps: ...} or a callable"),
    Discriminator(_branch),
]


def values_at(values: Mapping[str, Any], step: int) -> dict[str, float]:
    """Values of a step by name.

    Args:
        values: `values` of a spec.
        step: Step of the run, from 0.
    """
    return {
        name: value if isinstance(value, float) else float(_function(value)(step))
        for name, value in values.items()
    }


def _function(value: Any) -> Callable[[int], float]:
    function: Callable[[int], float] = import_strings.resolve(value)
    return function
