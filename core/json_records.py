"""Dataclasses from JSON: every field is checked by its type hint; errors name the file and the field."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from isotrain.core.errors import IsotrainError

T = TypeVar("T")
_MAX_INT = 2**63
"""Bound of integers: larger ones are no plausible measurements."""
_TYPE_NAMES = {
    float: "a number",
    int: "a whole number below 2**63",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        IsotrainError: It cannot be read, is not JSON, or is nested too deeply.
        FileNotFoundError: It does not exist.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IsotrainError(f"{path} cannot be read: {error}.") from None
    return json_value(content, str(path))


def json_value(content: bytes, where: str) -> Any:
    """Parses JSON.

    Args:
        content: JSON in UTF-8.
        where: Name of the file, with which every error begins.

    Raises:
        IsotrainError: It is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(content.decode())
    except ValueError as error:
        raise IsotrainError(f"{where} cannot be read: {error}.") from None
    except RecursionError:
        raise IsotrainError(f"{where} cannot be read: it is nested too deeply.") from None


def record(cls: type[T], plain: Any, where: str) -> T:
    """Creates a dataclass instance from a JSON object, and checks every field.

    Args:
        cls: Dataclass with fields of numbers, text, dataclasses, and lists, tuples or dicts of these.
        plain: JSON object with all fields without a default, and no unknown ones.
        where: Name of the file and the part of it, with which every error begins.

    Raises:
        IsotrainError: A field is missing or unknown, or has a value of another type.
    """
    if not isinstance(plain, Mapping):
        raise _type_error(where, "an object", plain)
    declared = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    additional = sorted(str(name) for name in plain.keys() - declared.keys())
    missing = [
        name
        for name, field in declared.items()
        if name not in plain and field.default is MISSING and field.default_factory is MISSING
    ]
    if additional or missing:
        problems = [*(f"lacks {name}" for name in missing), *(f"has {name}" for name in additional)]
        raise IsotrainError(
            f"{where}: it {', '.join(problems)}: it is not as isotrain of this version wrote it. Copy it"
            " anew, or measure again."
        )
    hints = _hints(cls)  # type: ignore[arg-type]
    return cls(**{name: value(hints[name], plain[name], f"{where}: {name}") for name in plain})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def value(hint: Any, plain: Any, where: str) -> Any:
    """Converts a JSON value to the type of a hint.

    Args:
        hint: Type hint.
        plain: JSON value.
        where: Name of the file and the field, with which every error begins.

    Raises:
        IsotrainError: The value has another type.
    """
    if hint is Any:
        return plain
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return record(hint, plain, where)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in _COMPOUND:
        return _COMPOUND[origin](inner, plain, where)
    return _scalar(hint, plain, where)


def _scalar(hint: Any, plain: Any, where: str) -> Any:
    if hint is float:
        return _number(plain, where)
    is_whole = hint is int and isinstance(plain, int) and not isinstance(plain, bool)
    if hint is int and is_whole and abs(plain) < _MAX_INT:
        return plain
    if hint in (str, bool, type(None)) and isinstance(plain, hint):
        return plain
    raise _type_error(where, _TYPE_NAMES[hint], plain)


def _number(plain: Any, where: str) -> float:
    """A number, or the text of a non-finite one."""
    if plain in ("NaN", "Infinity", "-Infinity") or (
        isinstance(plain, int | float) and not isinstance(plain, bool)
    ):
        try:
            return float(plain)
        except OverflowError:
            raise IsotrainError(f"{where}: a number of {len(str(plain))} digits.") from None
    raise _type_error(where, "a number", plain)


def _optional(inner: tuple[Any, ...], plain: Any, where: str) -> Any:
    """A value of a union with None, or of its first type."""
    if plain is None and type(None) in inner:
        return None
    return value(next(each for each in inner if each is not type(None)), plain, where)


def _literal(inner: tuple[Any, ...], plain: Any, where: str) -> Any:
    if plain not in inner:
        raise _type_error(where, f"one of {', '.join(inner)}", plain)
    return plain


def _list(inner: tuple[Any, ...], plain: Any, where: str) -> list[Any]:
    if not isinstance(plain, list | tuple):
        raise _type_error(where, "a list", plain)
    return [value(inner[0], each, f"{where}[{index}]") for index, each in enumerate(plain)]


def _tuple(inner: tuple[Any, ...], plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, list | tuple) or len(plain) != len(inner):
        raise _type_error(where, f"a list of {len(inner)}", plain)
    pairs = zip(inner, plain, strict=True)
    return tuple(value(hint, each, f"{where}[{i}]") for i, (hint, each) in enumerate(pairs))


def _mapping(inner: tuple[Any, ...], plain: Any, where: str) -> dict[str, Any]:
    if not isinstance(plain, Mapping):
        raise _type_error(where, "an object", plain)
    return {str(key): value(inner[1], each, f"{where}.{key}") for key, each in plain.items()}


_COMPOUND: dict[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {
    Union: _optional,
    types.UnionType: _optional,
    Literal: _literal,
    list: _list,
    tuple: _tuple,
    dict: _mapping,
}


def _type_error(where: str, expected: str, received: Any) -> IsotrainError:
    return IsotrainError(f"{where}: expected {expected}, received {received!r:.60}.")
