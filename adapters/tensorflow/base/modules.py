"""Submodules of a module, named by the attributes that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

_TRACKED = "_self_"
"""Prefix of the attributes by which TensorFlow tracks all other attributes a second time."""


def named_modules(module: Any, kinds: tuple[type, ...] = (tf.Module,)) -> list[tuple[str, Any]]:
    """Callable submodules of a module, at any depth, with their attribute paths.

    Of one that several attributes hold, what is inside has the shortest of these names alone; so modules may
    refer back to what holds them.

    Args:
        module: A `tf.Module`, or a Keras layer, whose private attributes (Keras' own) are skipped.
        kinds: Classes that count as modules.
    """
    callables: list[tuple[tuple[int, ...], str, Any]] = []
    holders: list[tuple[tuple[int, ...], str, Any]] = [((), "", module)]
    seen = {id(module)}
    for holder_path, prefix, holder in holders:
        for index, (name, value) in enumerate(
            _attributes(_public_attributes(holder), kinds, prefix)
        ):
            path = (*holder_path, index)
            if callable(value) and value is not module:
                callables.append((path, name, value))
            if id(value) not in seen:
                seen.add(id(value))
                holders.append((path, f"{name}.", value))
    return [(name, value) for _, name, value in sorted(callables, key=lambda each: each[0])]


def submodules_of(module: tf.Module, start: str = "") -> Iterator[tuple[str, tf.Module]]:
    """Outermost callable submodules of a module, each once, with their attribute paths.

    Args:
        module: The module.
        start: Prefix of the names.
    """
    holders, seen = [(start, module)], {id(module)}
    for prefix, holder in holders:
        for name, value in _attributes(_public_attributes(holder), (tf.Module,), prefix):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if callable(value):
                yield name, value
            else:
                holders.append((f"{name}.", value))


def _public_attributes(module: Any) -> Mapping[str, Any]:
    private_prefix = "_" if isinstance(module, keras.Layer) else _TRACKED
    return {
        name: value for name, value in vars(module).items() if not name.startswith(private_prefix)
    }


def _attributes(
    values: Mapping[str, Any], kinds: tuple[type, ...], prefix: str
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, kinds):
            yield f"{prefix}{name}", value
        elif isinstance(value, list | tuple):
            items = {str(index): item for index, item in enumerate(value)}
            yield from _attributes(items, kinds, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield from _attributes(value, kinds, f"{prefix}{name}.")
