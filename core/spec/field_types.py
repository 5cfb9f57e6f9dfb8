"""The kinds of values that fields of the spec hold: numbers, references, losses and metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from isotrain.core.spec import import_strings
from isotrain.core.spec.validation import (
    Problem,
    Words,
    as_python_number,
    raise_all,
)

_REFERENCE = {
    "type": "string",
    "pattern": "^.+:[^:]+$",
    "description": f"An import reference: {import_strings.SYNTAX}.",
}
_CODE = "^ISO[0-9]([0-9]{2})?$"
_NAME = "^[A-Za-z0-9][A-Za-z0-9_-]*$"
_PER_FRAMEWORK = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"not": {"enum": ["name", "call"]}},
}
_COMPONENT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        {
            "type": "object",
            "required": ["call", "order"],
            "properties": {
                "call": _REFERENCE,
                "order": {"enum": ["targets-first", "predictions-first"]},
            },
        },
    ]
}

Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Switch = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Options = dict[Text, Any]
FolderName = Annotated[
    str,
    Field(strict=True, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"),
    Words("1 to 100 letters, digits and . _ - that start with a letter, a digit or _"),
]


ArgumentOrder = Literal["targets-first", "predictions-first"]


@dataclass(frozen=True)
class Component:
    """A loss or a metric: a Keras name, an import reference or a callable, with options.

    Attributes:
        name: What it is; a text with a colon is an import reference.
        options: Keyword arguments: of the constructor for a Keras name, of each call otherwise.
        order: Of the arguments of a callable, where the spec says it (`{call: ..., order: ...}`).
        output: Of the model's several outputs the one that a metric measures; None for what the model gives.
        weighted: Whether sample weights count in a metric.
    """

    name: Any
    options: dict[str, Any] = field(default_factory=dict)
    order: ArgumentOrder | None = None
    output: str | None = None
    weighted: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """It in the form that it has in a file, its values as they are."""
        measured = {"output": self.output, "weighted": self.weighted or None}
        measured = {name: value for name, value in measured.items() if value is not None}
        if self.order is not None:
            return {"call": self.name, "order": self.order, **measured, **self.options}
        return {"name": self.name, **measured, **self.options}

    def shown(self, name: str) -> str:
        """The name under which a metric of that name is given, with that of its output as Keras has it."""
        own = f"weighted_{name}" if self.weighted else name
        return own if self.output is None else f"{self.output}_{own}"

    @property
    def is_reference(self) -> bool:
        """Whether `name` is a callable or names one to import, rather than a Keras name."""
        return not import_strings.is_bare_name(self.name)

    @property
    def label(self) -> str:
        """The name to print."""
        return import_strings.describe(self.name)


def _reference(value: Any, info: ValidationInfo) -> Any:
    """Checks a callable or an import reference; file references become absolute."""
    if isinstance(value, str):
        return _reference_text(value, info)
    if not callable(value):
        raise Problem(f"{import_strings.SYNTAX} or a callable", received=value).error()
    return value


def _reference_text(value: str, info: ValidationInfo) -> Any:
    """Checks an import reference; one of this very script, which no rank could import, is resolved."""
    context = info.context or {}
    form = import_strings.syntax_problem(value)
    if form is not None:
        raise Problem(import_strings.SYNTAX, received=value).error()
    found = import_strings.absolute(value, context.get("folder") or Path.cwd())
    wrong = import_strings.problem(found) if context.get("check_imports") else None
    if wrong is not None:
        raise Problem("an import path that exists", received=value, hint=wrong).error()
    is_of_script = context.get("check_imports") and found.startswith("__main__:")
    return import_strings.resolve(found) if is_of_script else found


def _model(value: Any, info: ValidationInfo) -> Any:
    """Accepts the name of a registered model, whose existence is the plan's to check."""
    if isinstance(value, str) and re.fullmatch(_NAME, value):
        return value
    return _per_framework(_builder)(value, info)


def _builder(value: Any, info: ValidationInfo) -> Any:
    """Refuses a model itself: every process builds its own, in its own framework."""
    has_weights = any(hasattr(value, name) for name in ("trainable_variables", "state_dict"))
    if has_weights and not isinstance(value, type | str):
        raise Problem(
            "a function that builds the model: `def model(): return ...`", received=value
        ).error()
    return _reference(value, info)


def _plugins(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise Problem("a list of modules and of files that end in .py", received=value).error()
    return tuple(_each(dict(enumerate(value)), _plugin, info).values())


def _plugin(value: Any, info: ValidationInfo) -> str:
    """Checks the name of a module or file; the path of a file becomes absolute."""
    context = info.context or {}
    if not isinstance(value, str):
        raise Problem('"package.module" or "path/to/file.py"', received=value).error()
    found = import_strings.absolute_module(value, context.get("folder") or Path.cwd())
    wrong = import_strings.module_problem(found) if context.get("check_imports") else None
    if wrong is not None:
        raise Problem("a module or file that exists", received=value, hint=wrong).error()
    return found


def _data(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return _reference_text(value, info)
    if value is None or _is_plain(value):
        raise Problem(f"{import_strings.SYNTAX} or a data source", received=value).error()
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value is made of nothing but what a text file can hold."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, str | int | float)


def _component(value: Any, info: ValidationInfo) -> Component:
    if isinstance(value, Component):
        return _component(value.fields, info)
    if isinstance(value, Mapping) and "call" in value:
        return _call(value, info)
    if isinstance(value, Mapping):
        if "name" not in value:
            raise Problem("a name", ("name",)).error()
        if isinstance(value["name"], Mapping):
            expected = "a name, an import reference or a callable"
            raise Problem(expected, ("name",), received=value["name"]).error()
        options = {key: as_python_number(option) for key, option in value.items() if key != "name"}
        return Component(_component(value["name"], info).name, options)
    if import_strings.is_bare_name(value) and value:
        return Component(value)
    if not (isinstance(value, str) or callable(value)) or value == "":
        expected = "a name, an import reference, a callable or {name: ..., option: ...}"
        raise Problem(expected, received=value).error()
    return Component(_reference(value, info))


def _call(value: Mapping[str, Any], info: ValidationInfo) -> Component:
    """Accepts a callable whose order of arguments is said."""
    if value.get("order") not in get_args(ArgumentOrder):
        expected = " or ".join(get_args(ArgumentOrder))
        raise Problem(expected, ("order",), received=value.get("order")).error()
    rest = {key: option for key, option in value.items() if key not in ("call", "order")}
    found = _component({"name": value["call"], **rest}, info)
    if not found.is_reference:
        raise Problem(
            f"{import_strings.SYNTAX} or a callable", ("call",), received=value["call"]
        ).error()
    return replace(found, order=value["order"])


def _each(
    values: Mapping[Any, Any], one: Callable[[Any, ValidationInfo], Any], info: ValidationInfo
) -> dict[Any, Any]:
    """Validates every value, and reports the problems of all of them at their keys."""
    good: dict[Any, Any] = {}
    problems: list[Problem] = []
    for key, value in values.items():
        try:
            good[key] = one(value, info)
        except PydanticCustomError as error:
            problems.append(Problem.of(error).below(key))
    raise_all("values", problems, values)
    return good


def _per_framework(one: Callable[[Any, ValidationInfo], Any]) -> Callable[..., Any]:
    def validate(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping) or "name" in value or "call" in value:
            return one(value, info)
        if not value or not all(isinstance(name, str) and name for name in value):
            raise Problem("a table {framework: ...} with a name each", received=value).error()
        return _each(value, one, info)

    return validate


def _is_table(value: Any) -> bool:
    """Whether a loss or metrics are given by name: of a framework or an output."""
    return isinstance(value, Mapping) and "name" not in value and "call" not in value


def _losses(value: Any, info: ValidationInfo) -> Any:
    """Accepts a loss, or a table of losses: by framework, by output, or by framework and then output."""
    if not _is_table(value):
        return _component(value, info)
    if not value or not all(isinstance(name, str) and name for name in value):
        expected = "a table {framework: loss} or {output: loss} with a name each"
        raise Problem(expected, received=value).error()
    return _each(value, lambda loss, info: _each_loss(loss, info), info)


def _each_loss(value: Any, info: ValidationInfo) -> Any:
    return _each(value, _component, info) if _is_table(value) and value else _component(value, info)


def _metrics(value: Any, info: ValidationInfo) -> tuple[Component, ...]:
    if _is_table(value):
        listed = {output: _metrics_of(output, given, info) for output, given in value.items()}
        return tuple(metric for metrics in listed.values() for metric in metrics)
    if not isinstance(value, list | tuple):
        expected = "a list of metrics, or a table {output: [metrics]}"
        raise Problem(expected, received=value).error()
    return tuple(_each(dict(enumerate(value)), _metric, info).values())


def _metrics_of(output: Any, given: Any, info: ValidationInfo) -> list[Component]:
    """The metrics of one output, of which there may be one."""
    several = given if isinstance(given, list | tuple) else [given]
    return [replace(_metric(metric, info), output=str(output)) for metric in several]


def _metric(value: Any, info: ValidationInfo) -> Component:
    """A metric, which may say of which output it is, and whether sample weights count in it."""
    fields = value.fields if isinstance(value, Component) else value
    if not isinstance(fields, Mapping):
        return _component(fields, info)
    rest = {name: part for name, part in fields.items() if name not in ("output", "weighted")}
    weighted = fields.get("weighted", False)
    if not isinstance(weighted, bool):
        raise Problem("true or false", ("weighted",), received=weighted).error()
    return replace(_component(rest, info), output=fields.get("output"), weighted=weighted)


def _code(value: Any, info: ValidationInfo) -> str:
    """Checks the form; which codes there are, `isotrain check` knows."""
    if not (isinstance(value, str) and re.fullmatch(_CODE, value)):
        raise Problem(
            "a code of isotrain check, such as 'ISO101', or the start of a group's, such as 'ISO4'",
            received=value,
            hint="docs/check.md lists all",
        ).error()
    return value


def _codes(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise Problem("a list of codes of isotrain check", received=value).error()
    return tuple(_each(dict(enumerate(value)), _code, info).values())


Reference = Annotated[Any, AfterValidator(_reference), WithJsonSchema(_REFERENCE)]
References = Annotated[
    Any,
    AfterValidator(_per_framework(_reference)),
    WithJsonSchema({"anyOf": [_REFERENCE, {**_PER_FRAMEWORK, "additionalProperties": _REFERENCE}]}),
]
Model = Annotated[
    Any,
    AfterValidator(_model),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": _NAME, "description": "A registered model."},
                _REFERENCE,
                {**_PER_FRAMEWORK, "additionalProperties": _REFERENCE},
            ]
        }
    ),
]
Plugins = Annotated[
    Any,
    AfterValidator(_plugins),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Data = Annotated[Any, AfterValidator(_data), WithJsonSchema(_REFERENCE)]
_LOSSES_BY_OUTPUT = {**_PER_FRAMEWORK, "additionalProperties": _COMPONENT}
Losses = Annotated[
    Any,
    AfterValidator(_losses),
    WithJsonSchema(
        {
            "anyOf": [
                _COMPONENT,
                {
                    **_PER_FRAMEWORK,
                    "additionalProperties": {"anyOf": [_COMPONENT, _LOSSES_BY_OUTPUT]},
                },
            ]
        }
    ),
]
_LISTED = {"type": "array", "items": _COMPONENT}
Metrics = Annotated[
    Any,
    AfterValidator(_metrics),
    WithJsonSchema(
        {
            "anyOf": [
                _LISTED,
                {**_PER_FRAMEWORK, "additionalProperties": {"anyOf": [_COMPONENT, _LISTED]}},
            ]
        }
    ),
]

Codes = Annotated[
    Any,
    AfterValidator(_codes),
    WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": _CODE}}),
]


def require_name(schema: dict[str, Any]) -> None:
    schema["required"] = ["name", *schema.get("required", [])]


def one_of_schema(*groups: tuple[str, ...]) -> dict[str, Any]:
    """JSON Schema for: of each group, exactly one field is given and is not null."""

    def given(name: str) -> dict[str, Any]:
        return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}

    return {"allOf": [{"oneOf": [given(name) for name in group]} for group in groups]}
