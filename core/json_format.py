"""Strict JSON: non-finite numbers are written as text ("NaN", "Infinity"), which RFC 8259 lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

FORMAT = 1
"""Version of all JSON that the command line prints, see `docs/command-line.md`."""
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
"""Texts that stand for non-finite numbers."""


def json_line(fields: Mapping[str, Any], default: Callable[[Any], Any] | None = str) -> str:
    """Serializes an object as one line of JSON.

    Args:
        fields: Fields of the object.
        default: Converts values that are no JSON types; None refuses them.

    Raises:
        TypeError: A value is no JSON type, and `default` is None.
    """
    return json.dumps(_strict(fields), default=default, allow_nan=False)


def prefixed_line(fields: Mapping[str, Any], prefix: str) -> str:
    """Line of JSON (`json_line`) after a prefix (if not empty) that distinguishes it from other output."""
    return f"{prefix} {json_line(fields)}" if prefix else json_line(fields)


def json_page(fields: Mapping[str, Any]) -> str:
    """Serializes an object as indented JSON."""
    return json.dumps(_strict(fields), default=str, allow_nan=False, indent=2)


def with_numbers(value: Any) -> Any:
    """Converts the texts of non-finite numbers back to floats, in nested JSON values."""
    if isinstance(value, str):
        return float(value) if value in _NON_FINITE else value
    if isinstance(value, Mapping):
        return {key: with_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_numbers(part) for part in value]
    return value


def _strict(value: Any) -> Any:
    """Converts non-finite floats to the texts "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return value
