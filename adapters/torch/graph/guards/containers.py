"""Mutable containers, arrays and tensors that are reachable from attributes."""

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

_MAX_CONTAINERS = 256
"""Number of containers that are compared per attribute."""
_MAX_ARRAY_BYTES = 2**16
"""Size in bytes up to which the contents of NumPy arrays are compared."""


class MutableContainer(NamedTuple):
    """An object whose contents may change in place.

    Attributes:
        name: Layer and attribute that it is reached from, for messages.
        value: The object.
        read: Function that returns its present contents, for comparison.
    """

    name: str
    value: Any
    read: Callable[[], Any]


def mutable_containers_in(name: str, value: Any, seen: set[int]) -> list[MutableContainer]:
    """Finds the mutable objects that an attribute leads to, at any depth.

    Args:
        name: Layer and attribute, for messages.
        value: Value of the attribute.
        seen: Identities (`id`) of objects that were visited already; extended in place.
    """
    containers: list[MutableContainer] = []
    pending = [value]
    while pending and len(containers) < _MAX_CONTAINERS:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        read = content_reader(each)
        if read is not None:
            containers.append(MutableContainer(name, each, read))
        pending += _children(each)
    return containers


def content_reader(value: Any) -> Callable[[], Any] | None:
    """Function that returns a value's contents or version; None if it is immutable or too large."""
    if isinstance(value, torch.Tensor):
        is_weight = isinstance(value, torch.nn.Parameter) or value.is_inference()
        return None if is_weight else functools.partial(private_api.version_of, value)
    if isinstance(value, np.ndarray):
        return value.tobytes if value.nbytes <= _MAX_ARRAY_BYTES else None
    if isinstance(value, dict | list | set) and len(value) > MAX_ENTRIES:
        return functools.partial(len, value)
    if isinstance(value, dict):
        return functools.partial(values_of, value)
    if isinstance(value, list | set):
        return functools.partial(list if isinstance(value, list) else set, value)
    return None


def values_of(mapping: dict[Any, Any]) -> list[Any]:
    """Values of a dict, also of a subclass with a `values` method of its own."""
    return list(dict.values(mapping))


def _children(value: Any) -> Iterable[Any]:
    """Objects inside a value that may themselves be mutable."""
    if isinstance(value, dict | list | set | tuple):
        if len(value) > MAX_ENTRIES:
            return ()
        return value.values() if isinstance(value, dict) else value
    if inspect.ismethod(value):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return (vars(value),) if is_user_object(value) else ()


def refill(value: Any, keys: list[Any], contents: Any) -> None:
    """Restores the contents of a container.

    Args:
        value: Dict, list or set to restore; anything else stays as it is.
        keys: Keys of a dict.
        contents: Contents as `content_reader` returned them.
    """
    if not isinstance(contents, list | set):
        return
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        kind.update(value, zip(keys, contents, strict=True))
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), contents)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, contents)
