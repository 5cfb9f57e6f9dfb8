"""What is inside of modules, by the attributes that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

_TRACKED = "_self_"
"""What the names of attributes begin with by which TensorFlow tracks all others once more."""


def named_modules(
    module: Any, kinds: tuple[type, ...] = (tf.Module,), start: str = ""
) -> Iterator[tuple[str, Any]]:
    """The modules inside of one that can be called, at any depth, by the attributes that hold them.

    Args:
        module: A `tf.Module`, or a layer of Keras, of which attributes count that are not Keras' own.
        kinds: What counts as a module.
        start: What their names begin with.
    """
    for name, value in _attributes(_own(module), kinds, start):
        if callable(value):
            yield name, value
        yield from named_modules(value, kinds, f"{name}.")


def parts_of(module: tf.Module, start: str = "") -> Iterator[tuple[str, tf.Module]]:
    """As `named_modules`, without those inside of others that can be called."""
    for name, value in _attributes(_own(module), (tf.Module,), start):
        if callable(value):
            yield name, value
        else:
            yield from parts_of(value, f"{name}.")


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
