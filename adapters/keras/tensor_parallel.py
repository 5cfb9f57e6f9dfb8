"""Tensor parallelism of a portable model: which layers are cut, and how their parts compute.

Column-parallel and row-parallel layers in pairs, with one sum over the parts in the forward pass and one in
the backward pass: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
from keras import ops

from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import SpecError

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
_ELEMENTWISE_LAYERS = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
_RULES = (
    "These can be cut: two Dense layers, each called once, with nothing but elementwise activations and"
    " Dropout between them in the graph of a model, MultiHeadAttention, and Embedding; trainable, held by one"
    " layer or model, without regularizers and constraints."
)


class Parts(Protocol):
    """The parts of a replica, each in a process, with the two differentiable collectives of their layers.

    Attributes:
        index: Index of this part.
        degree: Number of parts.
    """

    index: int
    degree: int

    def copy(self, tensor: Any) -> Any:
        """The tensor, of any shape, equal on all parts; its gradient is the sum of theirs. Collective."""

    def sum(self, tensor: Any) -> Any:
        """Sum of the parts' tensors, of one shape; each gets the gradient of the result. Collective."""


@dataclass(frozen=True)
class Cut:
    """A group of layers that is cut as one, with one sum over the parts in each direction.

    Attributes:
        layers: Names of the layers, for texts.
        axes: Variables to cut, each with the axis.
        features: Numbers per position that are summed in the forward pass, and in the backward pass.
        positions: Number of positions of a sample, such as the length of a sequence; None where it varies.
        apply: Makes the layers compute with this process's part of the variables.
    """

    layers: str
    axes: Sequence[tuple[keras.Variable, int]]
    features: tuple[int, int]
    positions: int | None
    apply: Callable[[Parts], None]

    def describe(self) -> str:
        """A line for the plan: the layers, their weights and axes, and what is summed."""
        weights = ", ".join(
            f"{variable.path} along axis {axis} to {list(variable.shape)}"
            for variable, axis in self.axes
        )
        forward, backward = (each * (self.positions or 1) for each in self.features)
        unit = "sample" if self.positions else "position"
        return (
            f"tensor: {self.layers}: cut {weights} here; the parts sum {forward} numbers a {unit} forward,"
            f" and {backward} backward"
        )


def part_bounds(size: int, parts: Parts) -> tuple[int, int]:
    """Start and length of this process's part of an axis; parts differ by one at most."""
    start, end = (size * index // parts.degree for index in (parts.index, parts.index + 1))
    return start, end - start


def find_cuts(
    model: keras.Model, degree: int, patterns: Sequence[str] | Mapping[str, str]
) -> list[Cut]:
    """The cuts of a model.

    Args:
        model: Portable model.
        degree: Number of parts.
        patterns: Names, or patterns of names, of the layers to cut; empty for all that can be.

    Raises:
        SpecError: There is nothing to cut, or there are fewer units, heads or rows than parts.
    """
    if isinstance(patterns, Mapping):
        raise SpecError(
            "strategy tensor: layers: the layers of a portable model are cut by a rule: expected their names,"
            f" without styles, received {dict(patterns)}."
        )
    layers = keras_private.layers_of(model)
    borrowed = _borrowed_variables(layers)
    found = [
        each
        for each in (*_dense_pairs(layers), *_attentions(layers), *_embeddings(layers))
        if borrowed.isdisjoint(id(variable) for variable, _ in each[0].axes)
    ]
    names = ", ".join(cut.layers for cut, _ in found) or "none"
    for pattern in patterns:
        if not any(_matches(cut, [pattern]) for cut, _ in found):
            is_a_layer = any(fnmatch.fnmatchcase(layer.name, pattern) for layer in layers)
            reason = f"stays whole. {_RULES}" if is_a_layer else "no layer has such a name."
            raise SpecError(
                f"strategy tensor: layers: {pattern!r}: {reason} Layers that can be cut here: {names}."
            )
    chosen = [each for each in found if not patterns or _matches(each[0], patterns)]
    if not chosen:
        raise SpecError(f"strategy tensor: no layer of the model can be cut. {_RULES}")
    for cut, (count, what) in chosen:
        if count < degree:
            raise SpecError(
                f"strategy tensor: {cut.layers}: expected {degree} {what} or more for this degree,"
                f" received {count}. Choose a smaller degree, or name the layers to cut by `layers`."
            )
    return [cut for cut, _ in chosen]


def require_portable(model: Any) -> keras.Model:
    """The model, if it is a Keras model.

    Raises:
        SpecError: It is something else.
    """
    if isinstance(model, keras.Model):
        return model
    raise SpecError(
        f"strategy tensor: the model function returned {type(model).__name__!r}, and layers are cut of a"
        " keras.Model, and on torch-ddp of a torch.nn.Module. Use strategy sharded or pipeline."
    )


def _borrowed_variables(layers: Sequence[keras.Layer]) -> set[int]:
    """Ids of the variables that layers hold besides their own layer and the one around it."""
    holders = Counter(
        id(variable)
        for layer in layers
        for each in (layer, *keras_private.sublayers_of(layer))
        for variable in keras_private.variables_of(each)
    )
    return {variable for variable, count in holders.items() if count > 2}


def _matches(cut: Cut, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(name, each) for name in cut.layers.split(", ") for each in patterns
    )


Found = tuple[Cut, tuple[int, str]]
"""A cut; and the number of what is cut, with its name."""


def _dense_pairs(layers: Sequence[keras.Layer]) -> Iterator[Found]:
    """Pairs of Dense layers: columns of the first one are cut, and rows of the second."""
    paired: set[int] = set()
    for model in layers:
        if isinstance(model, keras.Sequential) and model.built:
            model = keras.Model(model.inputs, model.outputs)
        if not keras_private.is_functional(model):
            continue
        nodes = keras_private.nodes_of(model)
        consumers: dict[int, list[Any]] = {id(out): [None] for out in model.outputs}
        for node in nodes:
            for tensor in node.input_tensors:
                consumers.setdefault(id(tensor), []).append(node)
        calls = [id(node.operation) for node in nodes]
        for node in nodes:
            first, between, second = node.operation, *_row_layer(node, consumers)
            if second is None or {id(first), id(second)} & paired:
                continue
            if (
                not _is_dense(first)
                or max(map(calls.count, map(id, [first, *between, second]))) > 1
            ):
                continue
            if _is_elementwise(first.activation):
                paired |= {id(first), id(second)}
                yield _dense_pair(first, between, second), (first.units, "units")


def _row_layer(
    node: Any, consumers: Mapping[int, list[Any]]
) -> tuple[list[keras.Layer], keras.Layer | None]:
    """The dropouts on the way to a Dense layer behind elementwise layers, and that layer or None."""
    dropouts: list[keras.Layer] = []
    while True:
        following = consumers.get(id(node.outputs[0]), [])
        if len(node.outputs) != 1 or len(following) != 1 or following[0] is None:
            return dropouts, None
        node = following[0]
        layer = node.operation
        if len(node.input_tensors) != 1:
            return dropouts, None
        if _is_dense(layer):
            return dropouts, layer
        if getattr(layer, "activity_regularizer", None):  # it would see the units of a part
            return dropouts, None
        if type(layer) is keras.layers.Dropout and layer.noise_shape is None:
            dropouts.append(layer)
        elif type(layer) not in _ELEMENTWISE_LAYERS and not (
            type(layer) is keras.layers.Activation and _is_elementwise(layer.activation)
        ):
            return dropouts, None


def _is_dense(layer: Any) -> bool:
    return type(layer) is keras.layers.Dense and _is_plain(layer)


def _is_plain(layer: keras.Layer) -> bool:
    """Whether no weight has a constraint or regularizer, nor any layer a low-rank or quantized form."""
    special = ("activity_regularizer", "quantization_mode", "lora_rank")
    return (
        layer.built
        and bool(layer.trainable_variables)
        and not any(
            getattr(each, name, None) for each in keras_private.layers_of(layer) for name in special
        )
        and not any(
            getattr(each, name, None)
            for each in layer.trainable_variables
            for name in ("constraint", "regularizer")
        )
    )


def _is_elementwise(activation: Any) -> bool:
    return getattr(
        activation, "__name__", ""
    ) in _ELEMENTWISE and activation is keras.activations.get(activation.__name__)


def _dense_pair(first: Any, dropouts: Sequence[Any], second: Any) -> Cut:
    axes = [(first.kernel, 1), (second.kernel, 0)]
    if first.bias is not None:
        axes.append((first.bias, 0))

    def apply(parts: Parts) -> None:
        compute = first.call
        _replace_call(first, lambda inputs, **options: compute(parts.copy(inputs), **options))
        _replace_call(second, functools.partial(_summed_product, second, parts, ops.matmul))
        second.input_spec = None  # it names the uncut length
        for each in dropouts:
            _drop_as_whole(each, -1, first.units, parts)

    positions = _positions(first.output.shape)
    features = (second.units, first.kernel.shape[0])
    return Cut(f"{first.name}, {second.name}", axes, features, positions, apply)


def _attentions(layers: Sequence[keras.Layer]) -> Iterator[Found]:
    """Attentions, whose heads are cut."""
    for layer in layers:
        if type(layer) is not keras.layers.MultiHeadAttention or not _is_plain(layer):
            continue
        if inner := keras_private.attention_layers(layer):
            yield _attention(layer, inner), (layer.num_heads, "heads")


def _attention(layer: Any, inner: keras_private.AttentionLayers) -> Cut:
    output = inner.output
    axes = [(output.kernel, 0)]
    for dense in inner.projections:
        axes.append((dense.kernel, 1))
        if dense.bias is not None:
            axes.append((dense.bias, 0))

    def apply(parts: Parts) -> None:
        compute = layer.call

        def call(query: Any, value: Any, key: Any = None, **options: Any) -> Any:
            if options.get("return_attention_scores"):
                raise SpecError(
                    f"strategy tensor: {layer.name} returns attention scores, and each process has those of"
                    " its heads. Name the other layers to cut by `layers`."
                )
            key = value if key is None else key
            inputs = {id(each): each for each in (query, value, key)}
            copies = {number: parts.copy(each) for number, each in inputs.items()}
            for number, each in inputs.items():
                keras_private.set_mask(copies[number], keras_private.mask_of(each))
                keras_private.set_mask(each, None)  # as Keras does
            return compute(*(copies[id(each)] for each in (query, value, key)), **options)

        _replace_call(layer, call)
        multiply = functools.partial(ops.einsum, output.equation)
        _replace_call(output, functools.partial(_summed_product, output, parts, multiply))
        _drop_as_whole(inner.dropout, inner.heads_axis, layer.num_heads, parts)

    features = (output.kernel.shape[-1], inner.projections[0].kernel.shape[0])
    return Cut(layer.name, axes, features, None, apply)


def _embeddings(layers: Sequence[keras.Layer]) -> Iterator[Found]:
    """Embeddings, whose vocabulary is cut."""
    for layer in layers:
        if type(layer) is keras.layers.Embedding and _is_plain(layer):
            yield _embedding(layer), (layer.input_dim, "rows")


def _embedding(layer: Any) -> Cut:
    def apply(parts: Parts) -> None:
        start, rows = part_bounds(layer.input_dim, parts)

        def call(inputs: Any) -> Any:
            indices = ops.cast(inputs, "int64")
            indices = ops.where(indices < 0, indices + layer.input_dim, indices)
            is_local = ops.logical_and(indices >= start, indices < start + rows)
            is_valid = ops.logical_and(indices >= 0, indices < layer.input_dim)
            others = ops.where(is_valid, 0, layer.input_dim)  # an index that the framework refuses
            rows_to_take = ops.where(is_local, indices - start, others)
            vectors = ops.take(layer.embeddings, rows_to_take, axis=0)
            vectors = ops.where(ops.expand_dims(is_local, -1), vectors, 0)
            return ops.cast(parts.sum(vectors), layer.compute_dtype)

        _replace_call(layer, call)

    return Cut(layer.name, [(layer.embeddings, 0)], (layer.output_dim, 0), None, apply)


def _summed_product(
    layer: Any, parts: Parts, multiply: Callable[[Any, Any], Any], inputs: Any, training: Any = None
) -> Any:
    """The call of a row-parallel layer: the parts' products are summed before bias and activation."""
    outputs = parts.sum(multiply(inputs, layer.kernel))
    if layer.bias is not None:
        outputs = outputs + layer.bias
    return outputs if layer.activation is None else layer.activation(outputs)


def _drop_as_whole(layer: Any, axis: int, size: int, parts: Parts) -> None:
    """Lets a Dropout draw for the uncut tensor and apply its part, so that it drops as without cuts.

    Args:
        layer: Dropout.
        axis: Axis of its inputs that is cut.
        size: Uncut length of this axis.
        parts: The parts of the replica.
    """
    compute = layer.call
    start, length = part_bounds(size, parts)

    def call(inputs: Any, training: bool = False) -> Any:
        if not training or not layer.rate:
            return inputs
        shape = list(ops.shape(inputs))
        shape[axis] = size
        factors = compute(ops.ones(shape, inputs.dtype), training=True)
        return inputs * ops.take(factors, ops.arange(start, start + length), axis=axis)

    _replace_call(layer, call)


def _replace_call(layer: Any, call: Callable[..., Any]) -> None:
    """Replaces the computation of one layer; Keras calls it as before."""
    object.__setattr__(layer, "call", call)


def _positions(shape: Sequence[int | None]) -> int | None:
    """Number of positions of a sample, of a tensor `[batch, ..., features]`; None where it varies."""
    sizes = [size for size in shape[1:-1] if size is not None]
    return math.prod(sizes) if len(sizes) == len(shape) - 2 else None
