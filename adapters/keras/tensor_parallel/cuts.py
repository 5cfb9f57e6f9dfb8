"""Tensor parallelism of a portable model: which layers are cut, and how their parts compute.

Column-parallel and row-parallel layers in pairs, with one sum over the parts in the forward pass and one in
the backward pass: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.tensor_parallel.cut import (
    Cut,
    embed,
    is_dense,
    is_elementwise,
    is_plain,
    positions_of,
    replace_call,
    summed,
)
from isotrain.adapters.keras.tensor_parallel.logits_layer import LogitsLayer
from isotrain.adapters.keras.tensor_parallel.parts import Parts, part_bounds
from isotrain.adapters.keras.tensor_parallel.whole_logits import why_whole
from isotrain.plugin import SpecError, TrainingSpec

_ELEMENTWISE_LAYERS = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
_RULES = (
    "These can be cut: two Dense layers, each called once, with nothing but elementwise activations and"
    " Dropout between them in the graph of a model, MultiHeadAttention, Embedding, and a Dense or"
    " ReversibleEmbedding that computes the logits of a cross-entropy; trainable, held by one layer or model,"
    " without regularizers and constraints."
)


def find_cuts(
    model: keras.Model,
    patterns: Sequence[str] | Mapping[str, str],
    parts: Parts,
    spec: TrainingSpec,
    framework: str,
) -> list[Cut]:
    """The cuts of a model.

    Args:
        model: Portable model.
        patterns: Names, or patterns of names, of the layers to cut; empty for all that can be, but no last
            Dense with fewer outputs than inputs, for which the parts would exchange more than they spare.
        parts: The parts of the replica.
        spec: Training spec, by whose loss the layer of the logits is cut or not.
        framework: Framework whose loss is used, where the spec has one per framework.

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
    found = [*_dense_pairs(layers), *_attentions(layers), *_embeddings(layers)]
    whole = why_whole(spec, framework)
    logits = LogitsLayer.of(model)
    paired = {id(variable) for cut, _ in found for variable, _ in cut.axes}
    if logits and not whole and not paired & {id(variable) for variable, _ in logits.axes}:
        found.append((logits.cut(spec, parts), (logits.classes, "classes")))
    found = [
        each for each in found if borrowed.isdisjoint(id(variable) for variable, _ in each[0].axes)
    ]
    names = ", ".join(cut.layers for cut, _ in found) or "none"
    for pattern in patterns:
        if not any(_matches(cut, [pattern]) for cut, _ in found):
            named = [each for each in layers if fnmatch.fnmatchcase(each.name, pattern)]
            reason = f"stays whole. {_RULES}" if named else "no layer has such a name."
            if whole and logits and any(each is logits.layer for each in named):
                reason = f"stays whole, as it computes logits: {whole}."
            raise SpecError(
                f"strategy tensor: layers: {pattern!r}: {reason} Layers that can be cut here: {names}."
            )
    if patterns:
        chosen = [each for each in found if _matches(each[0], patterns)]
    else:
        chosen = [each for each in found if not each[0].classes or (logits and logits.is_wide)]
    if not chosen:
        raise SpecError(f"strategy tensor: no layer of the model can be cut. {_RULES}")
    for cut, (count, what) in chosen:
        if count < parts.degree:
            raise SpecError(
                f"strategy tensor: {cut.layers}: expected {parts.degree} {what} or more for this degree,"
                f" received {count}. Choose a smaller degree, or name the layers to cut by `layers`."
            )
    return [cut for cut, _ in chosen]


def whole_logits_note(model: keras.Model, spec: TrainingSpec, framework: str) -> list[str]:
    """A line for the plan, if the layer of the logits could be cut but for the spec."""
    logits, reason = LogitsLayer.of(model), why_whole(spec, framework)
    if logits is None or not reason or not logits.is_wide:
        return []
    return [f"tensor: {logits.layer.name}: every process computes all logits: {reason}"]


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
            if not is_dense(first) or max(map(calls.count, map(id, [first, *between, second]))) > 1:
                continue
            if is_elementwise(first.activation):
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
        if is_dense(layer):
            return dropouts, layer
        if getattr(layer, "activity_regularizer", None):  # it would see the units of a part
            return dropouts, None
        if type(layer) is keras.layers.Dropout and layer.noise_shape is None:
            dropouts.append(layer)
        elif type(layer) not in _ELEMENTWISE_LAYERS and not (
            type(layer) is keras.layers.Activation and is_elementwise(layer.activation)
        ):
            return dropouts, None


def _dense_pair(first: Any, dropouts: Sequence[Any], second: Any) -> Cut:
    axes = [(first.kernel, 1), (second.kernel, 0)]
    if first.bias is not None:
        axes.append((first.bias, 0))

    def apply(parts: Parts) -> None:
        compute = first.call
        replace_call(first, lambda inputs, **options: compute(parts.copy(inputs), **options))
        replace_call(second, functools.partial(_summed_product, second, parts, ops.matmul))
        second.input_spec = None  # it names the uncut length
        for each in dropouts:
            _drop_as_whole(each, -1, first.units, parts)

    positions = positions_of(first.output.shape)
    exchange = summed(second.units, first.kernel.shape[0], positions)
    return Cut(f"{first.name}, {second.name}", axes, exchange, apply)


def _attentions(layers: Sequence[keras.Layer]) -> Iterator[Found]:
    """Attentions, whose heads are cut."""
    for layer in layers:
        if type(layer) is not keras.layers.MultiHeadAttention or not is_plain(layer):
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

        replace_call(layer, call)
        multiply = functools.partial(ops.einsum, output.equation)
        replace_call(output, functools.partial(_summed_product, output, parts, multiply))
        _drop_as_whole(inner.dropout, inner.heads_axis, layer.num_heads, parts)

    exchange = summed(output.kernel.shape[-1], inner.projections[0].kernel.shape[0], None)
    return Cut(layer.name, axes, exchange, apply)


def _embeddings(layers: Sequence[keras.Layer]) -> Iterator[Found]:
    """Embeddings, whose vocabulary is cut."""
    for layer in layers:
        if type(layer) is keras.layers.Embedding and is_plain(layer):
            yield _embedding(layer), (layer.input_dim, "rows")


def _embedding(layer: Any) -> Cut:
    def apply(parts: Parts) -> None:
        replace_call(layer, functools.partial(embed, layer, parts))

    return Cut(layer.name, [(layer.embeddings, 0)], summed(layer.output_dim, 0, None), apply)


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

    replace_call(layer, call)
