"""Activation checkpointing of Keras layers: their activations are recomputed in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

Seeds and moving statistics of such a layer are updated once: the layer is called as a pure function of
tensors, so that the second computation has the first one's results.
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
"""Turns a function of tensors into one whose activations are recomputed in the backward pass."""
_SEPARATOR = "/"


def recompute(model: keras.Layer, spec: TrainingSpec, recomputed: Recomputed) -> None:
    """Applies activation checkpointing to the layers that the spec names.

    Args:
        model: Built model.
        spec: Training spec, for the layer names.
        recomputed: The framework's checkpointing of a function.

    Raises:
        SpecError: The spec names a layer that does not exist.
    """
    for layer in layers_to_recompute(model, spec):
        recompute_layer(layer, recomputed)


def recompute_layer(
    layer: keras.Layer, recomputed: Recomputed, block_of: Callable[..., LayerCall] | None = None
) -> None:
    """Applies activation checkpointing to one layer, by replacing its `call`.

    Args:
        layer: Layer to recompute.
        recomputed: The framework's checkpointing of a function.
        block_of: Makes a `LayerCall` from layer, `call` and arguments; None: the class itself.
    """
    layer.call = _recomputed(layer, recomputed, block_of or LayerCall)


def layers_to_recompute(model: keras.Layer, spec: TrainingSpec) -> list[keras.Layer]:
    """The layers that the spec names, without those inside of another named layer.

    Raises:
        SpecError: The spec names a layer that does not exist.
    """
    layers = dict(_named(model))
    return [layers[name] for name in spec.recomputed(layers, _SEPARATOR)]


def _named(layer: keras.Layer, start: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """Pairs of name and layer for all layers inside of one, at any depth; nested names are joined by `/`."""
    for sublayer in keras_private.sublayers_of(layer):
        if not isinstance(sublayer, keras.layers.InputLayer):
            name = f"{start}{sublayer.name}"
            yield name, sublayer
            yield from _named(sublayer, f"{name}{_SEPARATOR}")


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
    """One call of a layer as a pure function of its trainable weights and its floating-point inputs."""

    def __init__(self, layer: keras.Layer, call: Callable[..., Any], arguments: Any) -> None:
        """Keeps the arguments, their masks, and copies of the non-trainable variables.

        Args:
            layer: Layer that is called.
            call: The layer's original `call`.
            arguments: Arguments of the call, `(args, kwargs)`.
        """
        self._layer = layer
        self._call = call
        self._surroundings = keras_private.call_context()
        self._trainable = list(layer.trainable_variables)
        self._others = list(layer.non_trainable_variables)
        with keras_private.uncast():
            self._before = [keras.ops.copy(v.value) for v in self._others]
        self._arguments = arguments
        self._leaves = keras.tree.flatten(arguments)
        self._masks = [keras_private.mask_of(leaf) for leaf in self._leaves]
        self._input_indices = [i for i, leaf in enumerate(self._leaves) if _is_differentiable(leaf)]
        self._outputs: Any = None
        self._masked: list[int] = []
        self._moved: list[int] = []

    def weights(self) -> list[Any]:
        """The layer's trainable weights as tensors, uncast: the first arguments of `run_flat`."""
        with keras_private.uncast():
            return [keras.ops.convert_to_tensor(v.value) for v in self._trainable]

    def inputs(self) -> list[Any]:
        """The floating-point tensors among the arguments: the other arguments of `run_flat`."""
        return [self._leaves[i] for i in self._input_indices]

    def run_flat(self, tensors: Sequence[Any]) -> list[Any]:
        """Calls the layer on `[*weights(), *inputs()]`.

        Returns:
            A flat list: outputs, masks of outputs, new values of updated variables, added losses.

        Raises:
            SpecError: The layer updates variables of other layers.
        """
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
        """Assigns updated variables, adds losses and sets masks from a flat result; returns the outputs."""
        remaining = iter(results)
        leaves = [next(remaining) for _ in keras.tree.flatten(self._outputs)]
        for index in self._masked:
            keras_private.set_mask(leaves[index], next(remaining))
        for index in self._moved:
            self._others[index].assign(next(remaining))
        for loss in remaining:
            keras.Layer.add_loss(self._layer, loss)  # functional models override add_loss
        return keras.tree.pack_sequence_as(self._outputs, leaves)

    def _scope(self, values: Sequence[tuple[keras.Variable, Any]]) -> keras.StatelessScope:
        """A scope that maps the layer's variables to values of their shapes and collects its losses."""
        return keras.StatelessScope(values, collect_losses=True)

    def _refusal(self) -> str:
        """Message for a layer that would update variables of other layers twice."""
        return (
            f"recompute: the layer {self._layer.name} moves variables that are not its own (it may draw"
            " random numbers without a seed generator of its own), and would move them a second time"
            " when it is computed again. Leave it out."
        )

    def _filled(self, tensors: Sequence[Any]) -> Any:
        leaves = list(self._leaves)
        for index, tensor in zip(self._input_indices, tensors, strict=True):
            leaves[index] = tensor
            keras_private.set_mask(tensor, self._masks[index])  # some layers remove it
        return keras.tree.pack_sequence_as(self._arguments, leaves)


def _is_differentiable(leaf: Any) -> bool:
    return keras.ops.is_tensor(leaf) and keras.backend.is_float_dtype(leaf.dtype)
