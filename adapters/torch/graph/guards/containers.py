"""What can be changed in place: the containers, arrays and tensors that attributes lead to."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from isotrain.adapters.common.object_walk import MAX_ENTRIES, is_user_object
from isotrain.adapters.torch.base import private_api

_MANY = 256
"""Holders that are looked at in one attribute."""
_LARGE_ARRAY = 2**16
"""Bytes of an array that is not looked at."""


class MutableContainer(NamedTuple):
    """Something that may hold something else later.

    Attributes:
        name: Where it was found, for messages.
        value: The very object.
        look: Gives what it holds now, to be compared.
    """

    name: str
    value: Any
    look: Callable[[], Any]


def mutable_containers_in(name: str, value: Any, known: set[int]) -> list[MutableContainer]:
    """Finds what can be changed in place behind an attribute, at any depth.

    Args:
        name: Of the attribute, for messages.
        value: Of the attribute.
        known: Identities of what was found already; grows.
    """
    found: list[MutableContainer] = []
    waiting = [value]
    while waiting and len(found) < _MANY:
        each = waiting.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        look = content_reader(each)
        if look is not None:
            found.append(MutableContainer(name, each, look))
        waiting += _parts(each)
    return found


def content_reader(value: Any) -> Callable[[], Any] | None:
    """What tells whether a value was changed in place; None where it cannot be, or is too large."""
    if isinstance(value, torch.Tensor):
        is_weight = isinstance(value, torch.nn.Parameter) or value.is_inference()
        return None if is_weight else functools.partial(private_api.version_of, value)
    if isinstance(value, np.ndarray):
        return value.tobytes if value.nbytes <= _LARGE_ARRAY else None
    if isinstance(value, dict | list | set) and len(value) > MAX_ENTRIES:
        return functools.partial(len, value)
    if isinstance(value, dict):
        return functools.partial(values_of, value)
    if isinstance(value, list | set):
        return functools.partial(list if isinstance(value, list) else set, value)
    return None


def values_of(held: dict[Any, Any]) -> list[Any]:
    """What a dict holds."""
    return list(dict.values(held))


def _parts(value: Any) -> Iterable[Any]:
    """What a value holds that may itself be changed in place."""
    if isinstance(value, dict | list | set | tuple):
        if len(value) > MAX_ENTRIES:
            return ()
        return value.values() if isinstance(value, dict) else value
    if inspect.ismethod(value):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return (vars(value),) if is_user_object(value) else ()


def refill(value: Any, names: list[Any], held: Any) -> None:
    """Gives a container back what it held.

    Args:
        value: A dict, list or set.
        names: The keys of a dict.
        held: What `content_reader` gave for it.
    """
    if not isinstance(held, list | set):
        return
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        kind.update(value, zip(names, held, strict=True))
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), held)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, held)
