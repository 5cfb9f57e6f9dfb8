"""Interception of changes of `trainable` of layers and variables."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras

from isotrain.adapters.common.private_api import PrivateApiProbe, require

Refuse = Callable[[Any], None]
_watched: dict[int, tuple[weakref.ref[Any], Refuse]] = {}


def watch_trainable(watched: Iterable[Any], refuse: Refuse) -> None:
    """Makes changes of `trainable` of these layers and variables call `refuse` first.

    Args:
        watched: Layers and variables; only weak references are kept.
        refuse: Called with the layer or variable; raises the error for the user.
    """
    for each in watched:
        _watch_class(type(each))
        _watched[id(each)] = weakref.ref(each, functools.partial(_forget, id(each))), refuse


def unwatch_trainable(watched: Iterable[Any]) -> None:
    """Allows `trainable` of these layers and variables to change again."""
    for each in watched:
        _watched.pop(id(each), None)


def _forget(number: int, _: weakref.ref[Any]) -> None:
    _watched.pop(number, None)


def _watch_class(kind: type) -> None:
    """Wraps the setter of `trainable`, in the base class that defines it, to check for watched objects."""
    base: Any = next(each for each in kind.__mro__ if "trainable" in vars(each))
    original = vars(base)["trainable"]
    if getattr(original.fset, "_looks", False):
        return

    def looking(owner: Any, value: Any) -> None:
        if _watched and bool(value) != owner.trainable:
            entry = _watched.get(id(owner))
            if entry is not None and entry[0]() is owner:
                entry[1](owner)
        original.fset(owner, value)

    vars(looking)["_looks"] = True
    base.trainable = property(original.fget, looking, doc=original.__doc__)


def _watches() -> None:
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    seen: list[Any] = []
    watch_trainable([layer, layer.kernel], seen.append)
    layer.trainable = True
    require(not seen, "nothing is said where nothing changes")
    layer.trainable = False
    require(seen[0] is layer and seen[1] is layer.kernel, "a layer sets its variables")
    unwatch_trainable([layer, layer.kernel])
    layer.trainable = True
    require(len(seen) == 2, "nothing is said of what is watched no more")


PROBES = (PrivateApiProbe("the setters of Layer.trainable and Variable.trainable", _watches),)
