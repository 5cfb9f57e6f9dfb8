"""Layers of a Keras model that are computed again in the backward pass, so that nothing of them is kept.

What such a layer moves (seeds, moving statistics) it moves once: it is called as a function of tensors
alone, so that the second computation gives what the first one gave.
Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import SpecError, TrainingSpec

Recomputed = Callable[[Callable[..., list[Any]]], Callable[..., list[Any]]]
"""Makes of a function of tensors one that a backward pass computes again."""
_SEPARATOR = "/"


def recompute(model: keras.Layer, spec: TrainingSpec, recomputed: Recomputed) -> None:
    """Has layers computed again in the backward pass, where the spec asks for it.

    Args:
        model: The built model.
        spec: Names the layers.
        recomputed: How the framework does it.

    Raises:
        SpecError: The spec names a layer that is not there.
    """
    for layer in layers_to_recompute(model, spec):
        recompute_layer(layer, recomputed)


def recompute_layer(
    layer: keras.Layer, recomputed: Recomputed, block_of: Callable[..., LayerCall] | None = None
) -> None:
    """Has one computed again in the backward pass.

    Args:
        layer: Which.
        recomputed: Computes a function again.
        block_of: Makes one call of it; None: with all variables where they are.
    """
    layer.call = _recomputed(layer, recomputed, block_of or LayerCall)


def layers_to_recompute(model: keras.Layer, spec: TrainingSpec) -> list[keras.Layer]:
    """The layers that the spec names, but for those inside of such layers.

    Raises:
        SpecError: The spec names a layer that is not there.
    """
    layers = dict(_named(model))
    return [layers[name] for name in spec.recomputed(layers, _SEPARATOR)]


def _named(layer: keras.Layer, start: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """The layers inside of one, at any depth, by their names."""
    for part in keras_private.sublayers_of(layer):
        if not isinstance(part, keras.layers.InputLayer):
            name = f"{start}{part.name}"
            yield name, part
            yield from _named(part, f"{name}{_SEPARATOR}")


def _recomputed(
    layer: keras.Layer, recomputed: Recomputed, block_of: Callable[..., LayerCall]
) -> Callable[..., Any]:
    call = layer.call

    @functools.wraps(call)
    def call_or_recompute(*args: Any, **kwargs: Any) -> Any:
        if not keras_private.is_training():
            return call(*args, **kwargs)
        block = block_of(layer, call, (args, kwargs))

        def compute(*tensors: Any) -> list[Any]:
            return block.run_flat(tensors)

        compute.__name__ = layer.name
        return block.unpack(recomputed(compute)(*block.weights(), *block.inputs()))

    return call_or_recompute


class LayerCall:
    """One call of a layer as a function of tensors: of its trainable weights, and of inputs."""

    def __init__(self, layer: keras.Layer, call: Callable[..., Any], given: Any) -> None:
        """Notes what the layer is called with.

        Args:
            layer: Which.
            call: Its own.
            given: Positional arguments, and others by name.
        """
        self._layer = layer
        self._call = call
        self._surroundings = keras_private.call_context()
        self._trainable = list(layer.trainable_variables)
        self._others = list(layer.non_trainable_variables)
        with keras_private.uncast():
            self._before = [keras.ops.copy(v.value) for v in self._others]
        self._given = given
        self._leaves = keras.tree.flatten(given)
        self._masks = [keras_private.mask_of(leaf) for leaf in self._leaves]
        self._places = [i for i, leaf in enumerate(self._leaves) if _is_differentiable(leaf)]
        self._outputs: Any = None
        self._masked: list[int] = []
        self._moved: list[int] = []

    def weights(self) -> list[Any]:
        """The first tensors that its results are differentiated by."""
        with keras_private.uncast():
            return [keras.ops.convert_to_tensor(v.value) for v in self._trainable]

    def inputs(self) -> list[Any]:
        """The others."""
        return [self._leaves[i] for i in self._places]

    def run_flat(self, tensors: Sequence[Any]) -> list[Any]:
        """Calls the layer; gives outputs, their masks, moved variables and added losses in a row."""
        count = len(self._trainable)
        variables = [*self._trainable, *self._others]
        values = [*tensors[:count], *self._before]
        scope = self._scope(list(zip(variables, values, strict=True)))
        before = [scope.get_current_value(variable) for variable in self._others]
        args, kwargs = self._filled(tensors[count:])
        with self._surroundings(), scope:
            outputs = self._call(*args, **kwargs)
        after = [scope.get_current_value(variable) for variable in self._others]
        if len(scope.state_mapping) > len(variables):
            raise SpecError(self._refusal())
        keras_private.forget_losses(keras_private.layers_of(self._layer), scope.losses)
        leaves = keras.tree.flatten(outputs)
        masks = [keras_private.mask_of(leaf) for leaf in leaves]
        self._outputs = keras.tree.map_structure(lambda leaf: None, outputs)
        self._masked = [i for i, mask in enumerate(masks) if mask is not None]
        self._moved = [i for i, value in enumerate(after) if value is not before[i]]
        return [
            *leaves,
            *(masks[i] for i in self._masked),
            *(after[i] for i in self._moved),
            *scope.losses,
        ]

    def unpack(self, results: Sequence[Any]) -> Any:
        """Moves what the call moved, and gives its outputs."""
        found = iter(results)
        leaves = [next(found) for _ in keras.tree.flatten(self._outputs)]
        for place in self._masked:
            keras_private.set_mask(leaves[place], next(found))
        for place in self._moved:
            self._others[place].assign(next(found))
        for loss in found:
            keras.Layer.add_loss(self._layer, loss)  # functional models take none
        return keras.tree.pack_sequence_as(self._outputs, leaves)

    def _scope(self, values: Sequence[tuple[keras.Variable, Any]]) -> keras.StatelessScope:
        """In which the layer has its weights, and other variables that it moves."""
        return keras.StatelessScope(values, collect_losses=True)

    def _refusal(self) -> str:
        """Why it cannot be: it would move twice what is not its own."""
        return (
            f"recompute: the layer {self._layer.name} moves variables that are not its own (it may draw"
            " random numbers without a seed generator of its own), and would move them a second time"
            " when it is computed again. Leave it out."
        )

    def _filled(self, tensors: Sequence[Any]) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
            keras_private.set_mask(tensor, self._masks[place])  # some layers take it off
        return keras.tree.pack_sequence_as(self._given, leaves)


def _is_differentiable(leaf: Any) -> bool:
    return keras.ops.is_tensor(leaf) and keras.backend.is_float_dtype(leaf.dtype)
