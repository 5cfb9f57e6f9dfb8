"""JSON as the command line prints it: strict, on any value that a run reports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

FORMAT = 1
"""The version of everything that the command line prints as JSON; see `docs/command-line.md`."""
_LACKING = ("NaN", "Infinity", "-Infinity")
"""The texts that stand for numbers which JSON lacks."""


def json_line(fields: Mapping[str, Any], default: Callable[[Any], Any] | None = str) -> str:
    """One object on one line; `default` makes what JSON lacks something that it has, or None refuses it.

    Raises:
        TypeError: A value is refused.
    """
    return json.dumps(_strict(fields), default=default, allow_nan=False)


def prefixed_line(fields: Mapping[str, Any], mark: str) -> str:
    """The same behind a mark, if there is one, that tells it from all else that is printed beside it."""
    return f"{mark} {json_line(fields)}" if mark else json_line(fields)


def json_page(fields: Mapping[str, Any]) -> str:
    """One object, indented."""
    return json.dumps(_strict(fields), default=str, allow_nan=False, indent=2)


def with_numbers(value: Any) -> Any:
    """The same with the numbers that JSON lacks in the place of the texts that stand for them."""
    if isinstance(value, str):
        return float(value) if value in _LACKING else value
    if isinstance(value, Mapping):
        return {key: with_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_numbers(part) for part in value]
    return value


def _strict(value: Any) -> Any:
    """Writes numbers that JSON lacks as the text "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return value
