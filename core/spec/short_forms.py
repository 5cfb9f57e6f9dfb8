"""Short forms of tables and lists in a spec, such as a bare name, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from isotrain.core.spec.initial_weights import InitialWeights

ShortForm: TypeAlias = Callable[[Any], Any]
"""Function from the value of a field to its long form; other values are unchanged."""


def value_of(key: str, *kinds: type) -> ShortForm:
    """Short form that is the value of one key: a string, or an instance of `kinds`."""
    return lambda value: {key: value} if isinstance(value, kinds or str) else value


def all_defaults(word: str) -> ShortForm:
    """Short form that is a word for a table of defaults."""
    return lambda value: {} if value == word else value


def switch(value: Any) -> Any:
    """Accepts true for a table of defaults, and false for null."""
    return ({} if value else None) if isinstance(value, bool) else value


def initial_weights(value: Any) -> Any:
    """Accepts a source, such as a path or a callable, for `{source: ...}`."""
    is_long = value is None or isinstance(value, Mapping | InitialWeights)
    return value if is_long else {"source": value}


DECAY = value_of("decay", int, float)
FACTOR = value_of("factor", int, float)
METRIC = value_of("metric")
NAME = value_of("name")
RULE = value_of("rule")
BITS = all_defaults("bits")
BY_SPEED = all_defaults("by-speed")

_TABLES: dict[tuple[str, ...], ShortForm] = {
    ("loss",): NAME,
    ("loss", "*"): NAME,
    ("metrics", "*"): NAME,
    ("metrics", "*", "*"): NAME,
    ("optimizer",): NAME,
    ("optimizer", "layer_decay"): FACTOR,
    ("optimizer", "groups", "*", "schedule"): NAME,
    ("order",): NAME,
    ("schedule",): NAME,
    ("strategy",): NAME,
    ("loggers", "*"): NAME,
    ("scaling",): RULE,
    ("initial_weights",): initial_weights,
    ("early_stopping",): METRIC,
    ("checkpoint", "keep_best"): METRIC,
    ("ema",): DECAY,
    ("reproducible",): BITS,
    ("shares",): BY_SPEED,
    ("profile",): switch,
}
"""Short forms by the path of the field; * stands for any name or index."""
_LISTS = (
    ("callbacks",),
    ("gradient_norm", "*"),
    ("initial_weights", "exclude"),
    ("initial_weights", "freeze"),
    ("initial_weights", "include"),
    ("loggers",),
    ("metrics", "*"),
    ("optimizer", "groups", "*", "weights"),
    ("optimizer", "layer_decay", "layers", "*"),
    ("per_replica",),
    ("plugins",),
    ("recompute",),
    ("weights",),
)
"""Paths of lists that a single entry may stand for."""


def expand(value: Any, path: Sequence[str], key: str) -> Any:
    """The table or list that the value of a field stands for, so that it can have an entry `key`.

    Args:
        value: Value in a spec file.
        path: Path of the field from the spec, or from one of its `updates`.
        key: Key or index of the entry.
    """
    if key.isdecimal() and isinstance(value, str | Mapping) and _matches(path, _LISTS):
        return [value]
    short_form = next(iter(_matches(path, _TABLES)), None)
    return value if short_form is None else _TABLES[short_form](value)


def _matches(path: Sequence[str], patterns: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns the patterns that fit a path."""
    return [
        pattern
        for pattern in patterns
        if len(pattern) == len(path)
        and all(part in ("*", key) for part, key in zip(pattern, path, strict=True))
    ]
