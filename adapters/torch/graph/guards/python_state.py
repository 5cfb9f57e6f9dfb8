"""Guards on Python attributes of layers, losses and metrics: a graph is valid while they stay equal."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.call_state import CallState
from isotrain.adapters.keras.carried_state import base_layer_attributes
from isotrain.adapters.torch.graph.guards.containers import (
    MutableContainer,
    content_reader,
    mutable_containers_in,
    refill,
    values_of,
)


class PythonState:
    """Snapshot of the attributes that a computation depends on, and their contents; compared in microseconds.

    Attributes:
        tensors: Tensors in attributes that are not weights, any shape.
        iterators: Iterators of Python that a call may advance, for messages.
    """

    def __init__(self, model: keras.Layer | None, callables: Sequence[Any] = ()) -> None:
        """Takes the snapshot.

        Args:
            model: Model whose layers are guarded; None for none.
            callables: Losses, an objective or metrics that are guarded too.
        """
        layers = [] if model is None else keras_private.layers_of(model)
        self._hooks = keras_private.hooks_of(layers)
        self._referred = CallState(layers, callables)
        self.iterators = self._referred.iterators()
        others = [owner for each in callables if (owner := _attribute_owner(each)) is not None]
        owners = [*layers, *others]
        self._attributes = [(_name(owner), vars(owner)) for owner in owners]
        self._containers = [*self._reachable(), *([] if model is None else _buffers(model))]
        self.tensors = [c.value for c in self._containers if isinstance(c.value, torch.Tensor)]
        self._readers = [container.read for container in self._containers]
        self._keys = [list(c.value) if isinstance(c.value, dict) else [] for c in self._containers]
        self._saved = self._read()

    def _reachable(self) -> Iterator[MutableContainer]:
        """Attribute dicts, and the mutable objects in them, except attributes that every Keras layer has."""
        seen = {id(attributes) for _, attributes in self._attributes}
        base_attributes = base_layer_attributes()
        for owner, attributes in self._attributes:
            yield MutableContainer(owner, attributes, functools.partial(values_of, attributes))
            for name, value in attributes.items():
                if name not in base_attributes:
                    yield from mutable_containers_in(f"{owner}: {name}", value, seen)

    def _read(self) -> list[Any]:
        return [read() for read in self._readers]

    @property
    def is_hooked(self) -> bool:
        """Whether a torch hook is registered on a layer."""
        return any(self._hooks)

    @property
    def is_unchanged(self) -> bool:
        """Whether all attributes and their contents equal the snapshot, and no hook was added."""
        try:
            return self._read() == self._saved and not any(self._hooks)
        except (TypeError, ValueError, RuntimeError):  # == of arrays is an array, not a bool
            return False

    def changes_in_call(self) -> str | None:
        """The attribute or variable that a call has changed, the latter of a class, module or function."""
        if not self.is_unchanged:
            return f"an attribute: {self.describe_change()}"
        variables = self._referred.changes()
        return f"a variable: {variables[0]}" if variables else None

    def describe_change(self) -> str:
        """Layer and name of the first attribute that differs from the snapshot."""
        for container, keys, saved in zip(self._containers, self._keys, self._saved, strict=True):
            if not _equal(container.read(), saved):
                return _changed_attribute(container, dict(zip(keys, saved, strict=False)))
        return "a hook was added"

    def restore(self) -> None:
        """Restores attributes, containers and what `changes_in_call` compares; tensors keep their values."""
        self._referred.restore()
        for container, keys, saved in zip(self._containers, self._keys, self._saved, strict=True):
            if not _equal(container.read(), saved):
                refill(container.value, keys, saved)


def _changed_attribute(container: MutableContainer, before: dict[Any, Any]) -> str:
    """Name of a container, with the first key whose value differs."""
    now = container.value if before else {}
    for name, value in now.items():
        if name not in before or not _equal(value, before[name]):
            return f"{container.name}: {name}"
    return container.name


def _attribute_owner(function: Any) -> Any | None:
    """Object whose attributes a callable computes with; None if it cannot have any."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    owner = function.__self__ if inspect.ismethod(function) else function
    return owner if hasattr(owner, "__dict__") else None


def _name(owner: Any) -> str:
    """Name of a layer or callable in messages."""
    class_name = type(owner).__name__
    name = getattr(owner, "name", None) or getattr(owner, "__name__", None)
    return f"{name} ({class_name})" if name else class_name


def _buffers(model: keras.Layer) -> Iterator[MutableContainer]:
    """Buffers of torch modules, which may change in a call."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            read = content_reader(buffer)
            if read is not None:
                yield MutableContainer(f"{_name(module)}: {name}", buffer, read)


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
