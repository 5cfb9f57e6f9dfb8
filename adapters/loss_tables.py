"""Tables of losses in a spec, by framework or by output: never both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from isotrain.plugin import SpecError

if TYPE_CHECKING:
    from isotrain.plugin import TrainingSpec

FRAMEWORKS = ("torch", "tensorflow", "jax")
"""Names that stand for a framework, beside those for which the spec gives a model."""


def check_loss_table(spec: TrainingSpec, framework: str) -> None:
    """Makes sure that a table of losses says one thing, before anything starts.

    Args:
        spec: Of the plan.
        framework: Whose entries of the spec are taken.

    Raises:
        SpecError: Some of its names are frameworks and others are not; or all are, and none is this one.
    """
    table = spec.loss
    if not isinstance(table, Mapping):
        return
    models = spec.model if isinstance(spec.model, Mapping) else ()
    known = {*FRAMEWORKS, *models} & set(table)
    if known and not set(table) <= known | {framework}:
        raise SpecError(_either(table, known))
    if known:
        spec.for_framework("loss", framework)


def _either(table: Mapping[str, Any], known: Collection[str]) -> str:
    """What to do about a table of losses by framework and by output."""
    return (
        f"loss: of {', '.join(table)}, {', '.join(sorted(known))} are frameworks and the others are not."
        " Give a table of frameworks or one of outputs; for outputs that are called like a framework, a table"
        " of outputs for each framework: {torch: {name: loss, ...}, tensorflow: {...}}."
    )
