"""A group of layers that is cut as one, and what the makers of such cuts have in common.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.tensor_parallel.parts import Parts, part_bounds

_ELEMENTWISE = frozenset(
    [
        "linear",
        "relu",
        "relu6",
        "leaky_relu",
        "elu",
        "celu",
        "selu",
        "gelu",
        "silu",
        "swish",
        "tanh",
        "sigmoid",
        "hard_sigmoid",
        "hard_silu",
        "hard_swish",
        "hard_tanh",
        "softplus",
        "softsign",
        "exponential",
        "mish",
        "squareplus",
        "log_sigmoid",
    ]
)
"""Names of Keras' activations that compute each element by itself."""


@dataclass(frozen=True)
class Cut:
    """A group of layers that is cut as one.

    Attributes:
        layers: Names of the layers, for texts.
        axes: Variables to cut, each with the axis.
        exchange: What the parts exchange in a step, for texts.
        apply: Makes the layers compute with this process's part of the variables.
        classes: Number of classes, of which each process has some, of layers that compute logits; else 0.
    """

    layers: str
    axes: Sequence[tuple[keras.Variable, int]]
    exchange: str
    apply: Callable[[Parts], None]
    classes: int = 0

    def describe(self) -> str:
        """A line for the plan: the layers, their weights and axes, and what is exchanged."""
        weights = ", ".join(
            f"{variable.path} along axis {axis} to {list(variable.shape)}"
            for variable, axis in self.axes
        )
        return f"tensor: {self.layers}: cut {weights} here; the parts {self.exchange}"


def is_dense(layer: Any) -> bool:
    """Whether a layer is a Dense of Keras, without what a part of it would compute otherwise."""
    return type(layer) is keras.layers.Dense and is_plain(layer)


def is_plain(layer: keras.Layer) -> bool:
    """Whether all weights are trainable, none has a constraint or regularizer, nor any layer another form.

    Such forms are low-rank and quantized ones.
    """
    special = ("activity_regularizer", "quantization_mode", "lora_rank")
    return (
        layer.built
        and bool(layer.weights)
        and all(each.trainable for each in layer.weights)
        and not any(
            getattr(each, name, None) for each in keras_private.layers_of(layer) for name in special
        )
        and not any(
            getattr(each, name, None)
            for each in layer.weights
            for name in ("constraint", "regularizer")
        )
    )


def is_elementwise(activation: Any) -> bool:
    """Whether a function is an activation of Keras that computes each element by itself."""
    name = getattr(activation, "__name__", "")
    return name in _ELEMENTWISE and activation is keras.activations.get(name)


def embed(layer: Any, parts: Parts, inputs: Any) -> Any:
    """The call of an Embedding of whose vocabulary this process has some rows."""
    start, rows = part_bounds(layer.input_dim, parts)
    indices = ops.cast(inputs, "int64")
    indices = ops.where(indices < 0, indices + layer.input_dim, indices)
    is_local = ops.logical_and(indices >= start, indices < start + rows)
    is_valid = ops.logical_and(indices >= 0, indices < layer.input_dim)
    others = ops.where(is_valid, 0, layer.input_dim)  # an index that the framework refuses
    rows_to_take = ops.where(is_local, indices - start, others)
    vectors = ops.take(layer.embeddings, rows_to_take, axis=0)
    vectors = ops.where(ops.expand_dims(is_local, -1), vectors, 0)
    return ops.cast(parts.sum(vectors), layer.compute_dtype)


def summed(forward: int, backward: int, positions: int | None) -> str:
    """Text for what the parts exchange in a step of layers with sums alone.

    Args:
        forward: Numbers per position that are summed in the forward pass.
        backward: Those in the backward pass.
        positions: Number of positions of a sample, such as the length of a sequence; None where it varies.
    """
    forward, backward = (each * (positions or 1) for each in (forward, backward))
    unit = "sample" if positions else "position"
    return f"sum {forward} numbers a {unit} forward, and {backward} backward"


def replace_call(layer: Any, call: Callable[..., Any]) -> None:
    """Replaces the computation of one layer; Keras calls it as before."""
    object.__setattr__(layer, "call", call)


def positions_of(shape: Sequence[int | None]) -> int | None:
    """Number of positions of a sample, of a tensor `[batch, ..., features]`; None where it varies."""
    sizes = [size for size in shape[1:-1] if size is not None]
    return math.prod(sizes) if len(sizes) == len(shape) - 2 else None
