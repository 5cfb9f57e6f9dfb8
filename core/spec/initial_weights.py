"""Spec section for the initial weights of a run: where they come from, and which are frozen."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema

from isotrain.core.errors import SpecError
from isotrain.core.spec import import_strings
from isotrain.core.spec.field_types import Text
from isotrain.core.spec.validation import ExpectedText, Problem, SpecModel
from isotrain.core.spec.weight_name_map import read_maps
from isotrain.core.system.files import is_url

_SOURCE = (
    "a file, a run, a checkpoint, or a function that returns names and arrays or a Keras model"
)


def _source(value: Any, info: ValidationInfo) -> Any:
    """Absolute path, URL, callable or import string."""
    value = getattr(value, "run_directory", getattr(value, "location", value))
    if callable(value) or value is None:
        return value
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise Problem(_SOURCE, received=value).error()
    text, folder = os.fspath(value), (info.context or {}).get("folder") or Path.cwd()
    if import_strings.syntax_problem(text) is None:
        return import_strings.absolute(text, folder)
    return text if is_url(text) else str((folder / Path(text).expanduser()).resolve())


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _map(value: Any, info: ValidationInfo) -> Any:
    """Name map, or absolute path of the file with it."""
    if isinstance(value, str | os.PathLike):
        folder = (info.context or {}).get("folder") or Path.cwd()
        value = str((folder / Path(value).expanduser()).resolve())
    try:
        read_maps(value)
    except SpecError as error:
        raise Problem("a name map", received=value, hint=str(error)).error() from None
    return value


Names = Annotated[Any, AfterValidator(_map), WithJsonSchema({"type": ["string", "object", "null"]})]
_TEXT = {"type": "string"}
Patterns = Annotated[
    tuple[Text, ...],
    ExpectedText("a pattern of names, or a list of patterns"),
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}),
]


class InitialWeights(SpecModel):
    """Initial weights of a run, and the weights that are frozen."""

    source: Annotated[Any, AfterValidator(_source), WithJsonSchema({"type": "string"})] = Field(
        default=None,
        description="Where weights come from: a file (.safetensors, .npz, .weights.h5, .keras, .pt, "
        ".pth, .onnx), the directory of a run, a checkpoint, or a callable that gives {name: array} or a "
        "Keras model, such as keras.applications:MobileNetV2; null for none.",
    )
    include: Patterns = Field(
        default=(), description="Patterns of the names that are loaded, such as backbone/*."
    )
    exclude: Patterns = Field(default=(), description="Patterns of names that are not loaded.")
    map: Names = Field(
        default=None,
        description="Which weight of the model is which of the source: as `parity --map`.",
    )
    freeze: Patterns = Field(
        default=(), description="Patterns of the names of weights that stay as they are."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires a source, except to freeze weights only."""
        if fields.get("source") is None:
            needs_source = any(fields.get(name) for name in ("include", "exclude", "map"))
            if needs_source or not fields.get("freeze"):
                yield Problem(_SOURCE, ("source",))

    def is_wanted(self, name: str) -> bool:
        """Whether `include` and `exclude` select a weight for loading."""
        return is_selected(name, self.include, self.exclude)


def patterns_of(value: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns of names, given as one or several."""
    return tuple(_as_list(value))


def is_selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether `include`, if there is any, matches a name, and `exclude` does not."""
    return (not include or matches(name, include)) and not matches(name, exclude)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the glob patterns; `*` also matches slashes and dots, which are alike."""
    dotted = name.replace("/", ".")
    return any(fnmatch.fnmatchcase(dotted, pattern.replace("/", ".")) for pattern in patterns)
