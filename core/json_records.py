"""Records read back from JSON: every field checked, and an error that names the file and the field."""

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
_MOST = 2**63
"""Whole numbers beyond it were not measured by anybody."""
_WORDS = {
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
        FileNotFoundError: It is not there.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IsotrainError(f"{path} cannot be read: {error}.") from None
    return json_value(content, str(path))


def json_value(content: bytes, where: str) -> Any:
    """The value that JSON text stands for.

    Args:
        content: In UTF-8.
        where: The file; the start of every error.

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
    """Makes a dataclass of plain JSON values, every one of them checked.

    Args:
        cls: A dataclass whose fields are numbers, text, dataclasses, and lists, tuples or dicts of these.
        plain: An object with all its fields but those that have a default, and no others.
        where: The file, and what in it; the start of every error.

    Raises:
        IsotrainError: A field is missing, is none of `cls`, or has a value of another type.
    """
    if not isinstance(plain, Mapping):
        raise _wrong(where, "an object", plain)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    additional = sorted(str(name) for name in plain.keys() - known.keys())
    missing = [
        name
        for name, field in known.items()
        if name not in plain and field.default is MISSING and field.default_factory is MISSING
    ]
    if additional or missing:
        found = [*(f"lacks {name}" for name in missing), *(f"has {name}" for name in additional)]
        raise IsotrainError(
            f"{where}: it {', '.join(found)}: it is not as isotrain of this version wrote it. Copy it"
            " anew, or measure again."
        )
    hints = _hints(cls)  # type: ignore[arg-type]
    return cls(**{name: value(hints[name], plain[name], f"{where}: {name}") for name in plain})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def value(hint: Any, plain: Any, where: str) -> Any:
    """A plain JSON value as one of a type.

    Raises:
        IsotrainError: It is none.
    """
    if hint is Any:
        return plain
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return record(hint, plain, where)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in _COMPOUND:
        return _COMPOUND[origin](inner, plain, where)
    return _simple(hint, plain, where)


def _simple(hint: Any, plain: Any, where: str) -> Any:
    if hint is float:
        return _number(plain, where)
    is_whole = hint is int and isinstance(plain, int) and not isinstance(plain, bool)
    if hint is int and is_whole and abs(plain) < _MOST:
        return plain
    if hint in (str, bool, type(None)) and isinstance(plain, hint):
        return plain
    raise _wrong(where, _WORDS[hint], plain)


def _number(plain: Any, where: str) -> float:
    """A number, also as the texts that stand for those which JSON lacks."""
    if plain in ("NaN", "Infinity", "-Infinity") or (
        isinstance(plain, int | float) and not isinstance(plain, bool)
    ):
        try:
            return float(plain)
        except OverflowError:
            raise IsotrainError(f"{where}: a number of {len(str(plain))} digits.") from None
    raise _wrong(where, "a number", plain)


def _either(inner: tuple[Any, ...], plain: Any, where: str) -> Any:
    """Null, or the one type that it may be besides."""
    if plain is None and type(None) in inner:
        return None
    return value(next(each for each in inner if each is not type(None)), plain, where)


def _chosen(inner: tuple[Any, ...], plain: Any, where: str) -> Any:
    if plain not in inner:
        raise _wrong(where, f"one of {', '.join(inner)}", plain)
    return plain


def _listed(inner: tuple[Any, ...], plain: Any, where: str) -> list[Any]:
    if not isinstance(plain, list | tuple):
        raise _wrong(where, "a list", plain)
    return [value(inner[0], each, f"{where}[{place}]") for place, each in enumerate(plain)]


def _row(inner: tuple[Any, ...], plain: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(plain, list | tuple) or len(plain) != len(inner):
        raise _wrong(where, f"a list of {len(inner)}", plain)
    pairs = zip(inner, plain, strict=True)
    return tuple(value(hint, each, f"{where}[{n}]") for n, (hint, each) in enumerate(pairs))


def _mapping(inner: tuple[Any, ...], plain: Any, where: str) -> dict[str, Any]:
    if not isinstance(plain, Mapping):
        raise _wrong(where, "an object", plain)
    return {str(key): value(inner[1], each, f"{where}.{key}") for key, each in plain.items()}


_COMPOUND: dict[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {
    Union: _either,
    types.UnionType: _either,
    Literal: _chosen,
    list: _listed,
    tuple: _row,
    dict: _mapping,
}


def _wrong(where: str, expected: str, received: Any) -> IsotrainError:
    return IsotrainError(f"{where}: expected {expected}, received {received!r:.60}.")
