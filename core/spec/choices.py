"""Choices of the spec by name: sections of which a name, a table or a callable selects one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from pydantic import Tag

from isotrain.core.spec.validation import BRANCH, Problem, SpecModel, unknown_choice


def tag(section: type[SpecModel]) -> Tag:
    """Tag of a union member for pydantic's discriminator: its name."""
    return Tag(f"{BRANCH}{getattr(section, 'name', None) or section.model_fields['name'].default}")


def names_of(union: Any, *, without_required: bool = False) -> tuple[str, ...]:
    """Names of a union's members; `without_required`: only those for which the name is enough."""
    members: list[type[SpecModel]] = [get_args(each)[0] for each in get_args(union)]
    return tuple(
        member.model_fields["name"].default
        for member in members
        if "name" in member.model_fields and not (without_required and _requires_fields(member))
    )


def _requires_fields(section: type[SpecModel]) -> bool:
    has_required = any(field.is_required() for field in section.model_fields.values())
    return has_required or any(True for _ in section.rules({}))


def named_choice(
    kind: str, names: tuple[str, ...], default: str | None, reference: str
) -> Callable[[Any], Any]:
    """Validator that accepts a bare name for `{name: NAME}`, and only names among `names`.

    Args:
        kind: What the section chooses, with its article, for messages.
        names: The names.
        default: Name of a table without one; None where it is required.
        reference: Field that has a callable in place of the name.
    """

    def validate(value: Any) -> Any:
        if isinstance(value, SpecModel):
            return value
        fields = {"name": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping):
            raise Problem(f"the name of {kind} or {{name: ..., ...}}", received=value).error()
        if "name" not in fields and reference in fields:
            return fields
        name = fields.get("name", default)
        if name is None:
            raise Problem(f"one of {', '.join(names)}", ("name",)).error()
        if name not in names:
            problem = unknown_choice(name, names, ("name",))
            hint = problem.hint or f"any other comes in as {{{reference}: ...}}"
            raise replace(problem, hint=hint).error()
        return {**fields, "name": name}

    return validate


def as_call(value: Any) -> Any:
    """Accepts a callable or an import string, alone or as the name, for `{call: ...}`."""
    fields = value if isinstance(value, Mapping) else {"name": value}
    name = fields.get("name")
    is_reference = callable(name) or (isinstance(name, str) and ":" in name)
    return (
        {"call": name, **{k: fields[k] for k in fields if k != "name"}} if is_reference else value
    )


def branch_of(value: Any) -> str:
    """Tag of the union member that a value selects, for pydantic's discriminator."""
    if isinstance(value, Mapping):
        return f"{BRANCH}{value.get('name', 'call' if 'call' in value else 'custom')}"
    return f"{BRANCH}{getattr(value, 'name', '')}"
