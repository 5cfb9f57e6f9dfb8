"""Types of spec fields: numbers, import strings, losses and metrics, with their validators."""

from __future__ import annotations

import os
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
    ExpectedText,
    Problem,
    as_python_number,
    raise_all,
)

REFERENCE_SCHEMA = {
    "type": "string",
    "pattern": "^.+:[^:]+$",
    "description": f"An import reference: {import_strings.SYNTAX}.",
}
"""JSON Schema of an import string."""
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
                "call": REFERENCE_SCHEMA,
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
    ExpectedText("1 to 100 letters, digits and . _ - that start with a letter, a digit or _"),
]


ArgumentOrder = Literal["targets-first", "predictions-first"]


@dataclass(frozen=True)
class Component:
    """A loss or a metric: a Keras name, an import reference or a callable, with options.

    Attributes:
        name: Keras name, import string (a text with a colon) or callable.
        options: Keyword arguments: of the constructor for a Keras name, of each call otherwise.
        order: Order of a callable's arguments, if the spec states it (`{call: ..., order: ...}`).
        output: Model output that a metric measures; None for all outputs.
        weighted: Whether a metric uses sample weights.
    """

    name: Any
    options: dict[str, Any] = field(default_factory=dict)
    order: ArgumentOrder | None = None
    output: str | None = None
    weighted: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The component in its form in a spec file, with unchanged values."""
        metric_fields = {"output": self.output, "weighted": self.weighted or None}
        metric_fields = {name: value for name, value in metric_fields.items() if value is not None}
        if self.order is not None:
            return {"call": self.name, "order": self.order, **metric_fields, **self.options}
        return {"name": self.name, **metric_fields, **self.options}

    def shown(self, name: str) -> str:
        """Reported name of a metric, as Keras has it: `OUTPUT_weighted_NAME` without the absent parts."""
        metric = f"weighted_{name}" if self.weighted else name
        return metric if self.output is None else f"{self.output}_{metric}"

    @property
    def is_reference(self) -> bool:
        """Whether `name` is a callable or an import string, rather than a Keras name."""
        return not import_strings.is_bare_name(self.name)

    @property
    def label(self) -> str:
        """Name for messages."""
        return import_strings.describe(self.name)


def _reference(value: Any, info: ValidationInfo) -> Any:
    """Validates a callable or an import string; file paths become absolute."""
    if isinstance(value, str):
        return _reference_text(value, info)
    if not callable(value):
        raise Problem(f"{import_strings.SYNTAX} or a callable", received=value).error()
    return value


def _reference_text(value: str, info: ValidationInfo) -> Any:
    """Validates an import string; one of the running script is resolved, because no rank could import it."""
    context = info.context or {}
    if import_strings.syntax_problem(value) is not None:
        raise Problem(import_strings.SYNTAX, received=value).error()
    reference = import_strings.absolute(value, context.get("folder") or Path.cwd())
    fault = import_strings.problem(reference) if context.get("check_imports") else None
    if fault is not None:
        raise Problem("an import path that exists", received=value, hint=fault).error()
    is_of_script = context.get("check_imports") and reference.startswith("__main__:")
    return import_strings.resolve(reference) if is_of_script else reference


def _frozen_model(value: Any, info: ValidationInfo) -> Any:
    """Validates a callable or an import string; or a run, by its result or directory, as an absolute path."""
    value = getattr(value, "run_directory", value)
    is_path = isinstance(value, str | os.PathLike)
    if not is_path or import_strings.syntax_problem(os.fspath(value)) is None:
        return _per_framework(_reference)(value, info)
    folder = (info.context or {}).get("folder") or Path.cwd()
    path = (folder / Path(value).expanduser()).resolve()
    if not path.is_dir():
        expected = f"{import_strings.SYNTAX}, a callable or the directory of a run"
        raise Problem(expected, received=str(value)).error()
    return str(path)


def _model(value: Any, info: ValidationInfo) -> Any:
    """Accepts the name of a registered model; the plan checks that it is registered."""
    if isinstance(value, str) and re.fullmatch(_NAME, value):
        return value
    return _per_framework(_builder)(value, info)


def _model_call(value: Any, info: ValidationInfo) -> Any:
    """Accepts `keywords`, a reference, or a table of references by framework."""
    if value == "keywords":
        return value
    if isinstance(value, str) and ":" not in value:
        expected = f"keywords, {import_strings.SYNTAX} or a table {{framework: ...}}"
        raise Problem(expected, received=value).error()
    return _per_framework(_reference)(value, info)


def _builder(value: Any, info: ValidationInfo) -> Any:
    """Refuses a model instance: every process builds its own, in its framework."""
    has_weights = any(hasattr(value, name) for name in ("trainable_variables", "state_dict"))
    if has_weights and not isinstance(value, type | str):
        raise Problem(
            "a function that builds the model: `def model(): return ...`", received=value
        ).error()
    return _reference(value, info)


def _column(value: Any, info: ValidationInfo) -> Any:
    """Accepts the name of a column, or a reference."""
    return value if import_strings.is_bare_name(value) and value else _reference(value, info)


def _plugins(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    plugins = [value] if isinstance(value, str) else value
    return _each_item("a list of modules and of files that end in .py", plugins, _plugin, info)


def _plugin(value: Any, info: ValidationInfo) -> str:
    """Validates a module name or file; the path of a file becomes absolute."""
    context = info.context or {}
    if not isinstance(value, str):
        raise Problem('"package.module" or "path/to/file.py"', received=value).error()
    module = import_strings.absolute_module(value, context.get("folder") or Path.cwd())
    fault = import_strings.module_problem(module) if context.get("check_imports") else None
    if fault is not None:
        raise Problem("a module or file that exists", received=value, hint=fault).error()
    return module


def _callbacks(value: Any, info: ValidationInfo) -> tuple[Any, ...]:
    """Accepts a single callback for a list of one."""
    listed = value if isinstance(value, list | tuple) else [value]
    return _each_item("a list of callbacks", listed, _callback, info)


def _callback(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str) and value:
        return value if import_strings.is_bare_name(value) else _reference_text(value, info)
    if value is None or _is_plain(value):
        expected = f"{import_strings.SYNTAX}, the name of a registered callback, or a callback"
        raise Problem(expected, received=value).error()
    return value


def _data(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return _reference_text(value, info)
    if value is None or _is_plain(value):
        raise Problem(f"{import_strings.SYNTAX} or a data source", received=value).error()
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value consists of JSON values only."""
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
    """Accepts `{call: ..., order: ...}`, a callable with its order of arguments."""
    if value.get("order") not in get_args(ArgumentOrder):
        expected = " or ".join(get_args(ArgumentOrder))
        raise Problem(expected, ("order",), received=value.get("order")).error()
    rest = {key: option for key, option in value.items() if key not in ("call", "order")}
    component = _component({"name": value["call"], **rest}, info)
    if not component.is_reference:
        raise Problem(
            f"{import_strings.SYNTAX} or a callable", ("call",), received=value["call"]
        ).error()
    return replace(component, order=value["order"])


def _each(
    values: Mapping[Any, Any],
    validator: Callable[[Any, ValidationInfo], Any],
    info: ValidationInfo,
) -> dict[Any, Any]:
    """Validates every value; reports all problems, each at its key."""
    validated: dict[Any, Any] = {}
    problems: list[Problem] = []
    for key, value in values.items():
        try:
            validated[key] = validator(value, info)
        except PydanticCustomError as error:
            problems.append(Problem.of(error).below(key))
    raise_all("values", problems, values)
    return validated


def _each_item(
    expected: str,
    values: Any,
    validator: Callable[[Any, ValidationInfo], Any],
    info: ValidationInfo,
) -> tuple[Any, ...]:
    """Validates every item of a list; reports all problems, each at its index."""
    if not isinstance(values, list | tuple):
        raise Problem(expected, received=values).error()
    return tuple(_each(dict(enumerate(values)), validator, info).values())


def _per_framework(
    validator: Callable[[Any, ValidationInfo], Any], expected: str = "a table {framework: ...}"
) -> Callable[..., Any]:
    """Validator that also accepts a table `{framework: value}`."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        if not _is_table(value):
            return validator(value, info)
        if not value or not all(isinstance(name, str) and name for name in value):
            raise Problem(f"{expected} with a name each", received=value).error()
        return _each(value, validator, info)

    return validate


def _is_table(value: Any) -> bool:
    """Whether losses or metrics are a table by framework or output."""
    return isinstance(value, Mapping) and "name" not in value and "call" not in value


def _loss(value: Any, info: ValidationInfo) -> Any:
    """Accepts a loss, or a table of losses by output."""
    return _each(value, _component, info) if _is_table(value) and value else _component(value, info)


def _metrics(value: Any, info: ValidationInfo) -> tuple[Component, ...]:
    if _is_table(value):
        by_output = {output: _metrics_of(output, each, info) for output, each in value.items()}
        return tuple(metric for metrics in by_output.values() for metric in metrics)
    return _each_item("a list of metrics, or a table {output: [metrics]}", value, _metric, info)


def _metrics_of(output: Any, value: Any, info: ValidationInfo) -> list[Component]:
    """Metrics of one output, given as a list or a single metric."""
    metrics = value if isinstance(value, list | tuple) else [value]
    return [replace(_metric(metric, info), output=str(output)) for metric in metrics]


def _metric(value: Any, info: ValidationInfo) -> Component:
    """Metric with the optional fields `output` and `weighted`."""
    fields = value.fields if isinstance(value, Component) else value
    if not isinstance(fields, Mapping):
        return _component(fields, info)
    rest = {name: part for name, part in fields.items() if name not in ("output", "weighted")}
    weighted = fields.get("weighted", False)
    if not isinstance(weighted, bool):
        raise Problem("true or false", ("weighted",), received=weighted).error()
    return replace(_component(rest, info), output=fields.get("output"), weighted=weighted)


def _code(value: Any, info: ValidationInfo) -> str:
    """Validates the form of a code; `isotrain check` checks that it exists."""
    if not (isinstance(value, str) and re.fullmatch(_CODE, value)):
        raise Problem(
            "a code of isotrain check, such as 'ISO101', or the start of a group's, such as 'ISO4'",
            received=value,
            hint="docs/check.md lists all",
        ).error()
    return value


def _codes(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    return _each_item("a list of codes of isotrain check", value, _code, info)


Reference = Annotated[Any, AfterValidator(_reference), WithJsonSchema(REFERENCE_SCHEMA)]
Column = Annotated[Any, AfterValidator(_column), WithJsonSchema({"type": "string", "minLength": 1})]
References = Annotated[
    Any,
    AfterValidator(_per_framework(_reference)),
    WithJsonSchema(
        {"anyOf": [REFERENCE_SCHEMA, {**_PER_FRAMEWORK, "additionalProperties": REFERENCE_SCHEMA}]}
    ),
]
FrozenModelSource = Annotated[
    Any,
    AfterValidator(_frozen_model),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {**_PER_FRAMEWORK, "additionalProperties": REFERENCE_SCHEMA},
            ]
        }
    ),
]
ModelCall = Annotated[
    Any,
    AfterValidator(_model_call),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "keywords"},
                REFERENCE_SCHEMA,
                {**_PER_FRAMEWORK, "additionalProperties": REFERENCE_SCHEMA},
            ]
        }
    ),
]
Model = Annotated[
    Any,
    ExpectedText(f"{import_strings.SYNTAX} or a table {{framework: ...}}"),
    AfterValidator(_model),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": _NAME, "description": "A registered model."},
                REFERENCE_SCHEMA,
                {**_PER_FRAMEWORK, "additionalProperties": REFERENCE_SCHEMA},
            ]
        }
    ),
]
Plugins = Annotated[
    Any,
    AfterValidator(_plugins),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Data = Annotated[
    Any,
    ExpectedText(f"{import_strings.SYNTAX} or a data source"),
    AfterValidator(_data),
    WithJsonSchema(REFERENCE_SCHEMA),
]
_LOSSES_BY_OUTPUT = {**_PER_FRAMEWORK, "additionalProperties": _COMPONENT}
Losses = Annotated[
    Any,
    AfterValidator(_per_framework(_loss, "a table {framework: loss} or {output: loss}")),
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

_CALLBACK = {
    "anyOf": [
        {"type": "string", "pattern": _NAME, "description": "A registered callback."},
        REFERENCE_SCHEMA,
    ]
}
Callbacks = Annotated[
    Any,
    AfterValidator(_callbacks),
    WithJsonSchema({"anyOf": [_CALLBACK, {"type": "array", "items": _CALLBACK}]}),
]
Codes = Annotated[
    Any,
    AfterValidator(_codes),
    WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": _CODE}}),
]


def require_name(schema: dict[str, Any]) -> None:
    """Makes the field `name` required in a JSON Schema."""
    schema["required"] = ["name", *schema.get("required", [])]


def one_of_schema(*groups: tuple[str, ...]) -> dict[str, Any]:
    """JSON Schema that requires exactly one field of each group to be set, and not null."""

    def is_set(name: str) -> dict[str, Any]:
        return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}

    return {"allOf": [{"oneOf": [is_set(name) for name in group]} for group in groups]}
