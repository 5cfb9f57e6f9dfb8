"""A dict of Keras models as one layer: what a model function that returns a dict gives.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import keras

from isotrain.adapters.common.outputs import no_single_model_error
from isotrain.adapters.keras import private as keras_private


class ModelDict(keras.layers.Layer):
    """Keras models by name, read as a dict; the names of their weights begin with `NAME/`."""

    def __init__(self, models: Mapping[str, keras.Layer]) -> None:
        super().__init__(name="models")
        self.models = dict(models)
        self.built = True
        for name, model in models.items():
            for variable in model.variables:
                if not variable.path.startswith(f"{name}/"):
                    keras_private.set_path(variable, f"{name}/{variable.path}")

    def __getitem__(self, name: str) -> Any:
        return self.models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def keys(self) -> KeysView[str]:
        """Names of the models."""
        return self.models.keys()

    def values(self) -> ValuesView[Any]:
        """The models."""
        return self.models.values()

    def items(self) -> ItemsView[str, Any]:
        """Names and models."""
        return self.models.items()

    def call(self, inputs: Any) -> Any:
        """Refuses to choose one of the models."""
        raise no_single_model_error(self.models)
