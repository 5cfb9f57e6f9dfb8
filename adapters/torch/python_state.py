"""What the layers of a Keras model hold besides tensors: a record is good for as long as it stays."""

from __future__ import annotations

from typing import Any

import keras

from isotrain.adapters import keras_private


class PythonState:
    """The attributes of every layer of a model, compared as a whole in microseconds."""

    def __init__(self, model: keras.Layer) -> None:
        """Looks at a model; attributes are those that its layers have at this moment."""
        self._layers = keras_private.layers_of(model)
        self._attributes = [vars(layer) for layer in self._layers]
        self._hooks = keras_private.hooks_of(self._layers)
        self._names = [*map(list, self._attributes)]
        self._values = self._now()

    def _now(self) -> list[list[Any]]:
        return [*map(list, map(dict.values, self._attributes))]

    @property
    def is_hooked(self) -> bool:
        """Whether a torch hook waits for a layer to be called."""
        return any(self._hooks)

    @property
    def is_unchanged(self) -> bool:
        """Whether every attribute is as it was, and no hook was added."""
        try:
            return self._now() == self._values and not any(self._hooks)
        except (TypeError, ValueError, RuntimeError):  # arrays that are others have no one answer
            return False

    def change(self) -> str:
        """The first attribute that is another now, with its layer."""
        for layer, names, values in zip(self._layers, self._names, self._values, strict=True):
            before = dict(zip(names, values, strict=True))
            for name, value in vars(layer).items():
                if name not in before or not _equal(value, before[name]):
                    return f"{layer.name} ({type(layer).__name__}): {name}"
        return "a hook was added"

    def restore(self) -> None:
        """Gives every attribute the value that it had."""
        for attributes, names, values in zip(
            self._attributes, self._names, self._values, strict=True
        ):
            for name in attributes.keys() - set(names):
                del attributes[name]
            attributes.update(zip(names, values, strict=True))


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
