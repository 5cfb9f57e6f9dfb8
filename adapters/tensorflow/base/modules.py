"""What is inside of modules, by the attributes that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

_TRACKED = "_self_"
"""What the names of attributes begin with by which TensorFlow tracks all others once more."""


def named_modules(module: Any, kinds: tuple[type, ...] = (tf.Module,)) -> list[tuple[str, Any]]:
    """The modules inside of one that can be called, at any depth, by the attributes that hold them.

    Of one that several attributes hold, what is inside has the shortest of these names alone; so modules may
    refer back to what holds them.

    Args:
        module: A `tf.Module`, or a layer of Keras, of which attributes count that are not Keras' own.
        kinds: What counts as a module.
    """
    found: list[tuple[tuple[int, ...], str, Any]] = []
    holders: list[tuple[tuple[int, ...], str, Any]] = [((), "", module)]
    known = {id(module)}
    for place, start, holder in holders:
        for number, (name, value) in enumerate(_attributes(_own(holder), kinds, start)):
            own = (*place, number)
            if callable(value) and value is not module:
                found.append((own, name, value))
            if id(value) not in known:
                known.add(id(value))
                holders.append((own, f"{name}.", value))
    return [(name, value) for _, name, value in sorted(found, key=lambda each: each[0])]


def submodules_of(module: tf.Module, start: str = "") -> Iterator[tuple[str, tf.Module]]:
    """As `named_modules`, without those inside of others that can be called, and each once.

    Args:
        module: Which.
        start: What their names begin with.
    """
    holders, known = [(start, module)], {id(module)}
    for begin, holder in holders:
        for name, value in _attributes(_own(holder), (tf.Module,), begin):
            if id(value) in known:
                continue
            known.add(id(value))
            if callable(value):
                yield name, value
            else:
                holders.append((f"{name}.", value))


def _own(module: Any) -> Mapping[str, Any]:
    foreign = "_" if isinstance(module, keras.Layer) else _TRACKED
    return {name: value for name, value in vars(module).items() if not name.startswith(foreign)}


def _attributes(
    values: Mapping[str, Any], kinds: tuple[type, ...], start: str
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, kinds):
            yield f"{start}{name}", value
        elif isinstance(value, list | tuple):
            several = {str(n): v for n, v in enumerate(value)}
            yield from _attributes(several, kinds, f"{start}{name}.")
        elif isinstance(value, dict):
            yield from _attributes(value, kinds, f"{start}{name}.")
