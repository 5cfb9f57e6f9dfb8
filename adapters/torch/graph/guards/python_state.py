"""What the layers of a Keras model hold besides tensors: a record is good for as long as it stays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.carried_state import base_layer_attributes
from isotrain.adapters.torch.graph.guards.containers import (
    MutableContainer,
    content_reader,
    mutable_containers_in,
    refill,
    values_of,
)


class PythonState:
    """The attributes by which something computes, and what is in them, compared as a whole in microseconds.

    Attributes:
        tensors: Those in attributes that are no weights.
    """

    def __init__(self, model: keras.Layer | None, callables: Sequence[Any] = ()) -> None:
        """Looks at them; attributes are those that there are at this moment.

        Args:
            model: Whose layers are looked at; None for none.
            callables: What computes besides, by attributes of its own: losses, an objective, metrics.
        """
        layers = [] if model is None else keras_private.layers_of(model)
        self._hooks = keras_private.hooks_of(layers)
        others = [owner for each in callables if (owner := _owner(each)) is not None]
        owners = [*layers, *others]
        self._attributes = [(_name(owner), vars(owner)) for owner in owners]
        self._holders = [*self._inside(), *([] if model is None else _buffers(model))]
        self.tensors = [h.value for h in self._holders if isinstance(h.value, torch.Tensor)]
        self._looks = [holder.look for holder in self._holders]
        self._names = [list(h.value) if isinstance(h.value, dict) else [] for h in self._holders]
        self._seen = self._now()

    def _inside(self) -> Iterator[MutableContainer]:
        """Attributes, and what can be changed in place in them but for what Keras keeps in every layer."""
        known = {id(attributes) for _, attributes in self._attributes}
        usual = base_layer_attributes()
        for owner, attributes in self._attributes:
            yield MutableContainer(owner, attributes, functools.partial(values_of, attributes))
            for name, value in attributes.items():
                if name not in usual:
                    yield from mutable_containers_in(f"{owner}: {name}", value, known)

    def _now(self) -> list[Any]:
        return [look() for look in self._looks]

    @property
    def is_hooked(self) -> bool:
        """Whether a torch hook waits for a layer to be called."""
        return any(self._hooks)

    @property
    def is_unchanged(self) -> bool:
        """Whether every attribute is and holds what it was and held, and no hook was added."""
        try:
            return self._now() == self._seen and not any(self._hooks)
        except (TypeError, ValueError, RuntimeError):  # arrays that are others have no one answer
            return False

    def change(self) -> str:
        """The first attribute that is another now, with its layer."""
        for holder, names, held in zip(self._holders, self._names, self._seen, strict=True):
            if not _equal(holder.look(), held):
                return _changed(holder, dict(zip(names, held, strict=False)))
        return "a hook was added"

    def restore(self) -> None:
        """Gives every attribute what it was and held; tensors stay as they are."""
        for holder, names, held in zip(self._holders, self._names, self._seen, strict=True):
            if not _equal(holder.look(), held):
                refill(holder.value, names, held)


def _changed(holder: MutableContainer, before: dict[Any, Any]) -> str:
    """A holder, and which of its attributes is another now."""
    now = holder.value if before else {}
    for name, value in now.items():
        if name not in before or not _equal(value, before[name]):
            return f"{holder.name}: {name}"
    return holder.name


def _owner(called: Any) -> Any | None:
    """What has the attributes by which a loss or an objective computes; None where nothing can have any."""
    called = inspect.unwrap(called)
    while isinstance(called, functools.partial):
        called = called.func
    owner = called.__self__ if inspect.ismethod(called) else called
    return owner if hasattr(owner, "__dict__") else None


def _name(owner: Any) -> str:
    """As messages call it."""
    kind = type(owner).__name__
    own = getattr(owner, "name", None) or getattr(owner, "__name__", None)
    return f"{own} ({kind})" if own else kind


def _buffers(model: keras.Layer) -> Iterator[MutableContainer]:
    """Tensors that torch's own modules move when they are called."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            look = content_reader(buffer)
            if look is not None:
                yield MutableContainer(f"{_name(module)}: {name}", buffer, look)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
