"""A portable model, split into chunks between the layers of its graph.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.common.pipeline.checks import (
    MASK_AT_SPLIT,
    MASKED_LOSS,
    chunk_bounds,
    require_no_shared_weights,
)
from isotrain.adapters.common.pipeline.profiler import ProfiledCall
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.model import LayerLosses
from isotrain.plugin import (
    LayerCost,
    ModelProfile,
    Partitioner,
    SpecError,
    TrainingSpec,
    UnsupportedError,
)

Key = int
"""Identity of a symbolic tensor of the graph."""


class Chunk(keras.layers.Layer):
    """The layers of a model between two cuts, as a layer.

    Attributes:
        input_keys: Keys of the tensors that it needs of earlier chunks, or passes on.
        names: Names of its layers.
        output_keys: Keys of the tensors that later chunks need of it and earlier ones; empty for the last.
    """

    def __init__(self, nodes: Sequence[Any], input_keys: list[Key], output_keys: list[Key]) -> None:
        super().__init__(autocast=False)
        self._nodes = tuple(nodes)
        self.inner = [node.operation for node in nodes if isinstance(node.operation, keras.Layer)]
        self.names = tuple(node.operation.name for node in nodes)
        self.input_keys, self.output_keys = tuple(input_keys), tuple(output_keys)
        self.built = True

    def call(self, tensors: Mapping[Key, Any], training: bool | None = None) -> dict[Key, Any]:
        """Computes the outputs of its layers; returns them together with its input tensors."""
        computed = dict(tensors)
        for node in self._nodes:
            args, kwargs = node.arguments.fill_in(computed)
            if isinstance(node.operation, keras.Layer):
                kwargs["training"] = training  # instead of the value in the graph
            outputs = keras.tree.flatten(node.operation(*args, **kwargs))
            computed |= {id(like): value for like, value in zip(node.outputs, outputs, strict=True)}
        return computed

    def boundary_tensors(self, tensors: Mapping[Key, Any]) -> list[Any]:
        """Tensors that later chunks receive, selected from the computed ones.

        Raises:
            UnsupportedError: One has a mask, which would not be sent along.
        """
        outputs = [tensors[key] for key in self.output_keys]
        if any(keras_private.mask_of(each) is not None for each in outputs):
            raise UnsupportedError(MASK_AT_SPLIT)
        return outputs


class KerasPipelineModel:
    """A portable model, split into chunks.

    Attributes:
        model: The functional model.
        parts: Graph nodes of each chunk.
        chunks: Chunks of the model, from the inputs on.
    """

    def __init__(self, model: keras.Model, chunks: int, first: Sequence[str]) -> None:
        """Splits a model.

        Args:
            model: Functional or Sequential model.
            chunks: Number of chunks.
            first: Names of the layers at which chunks begin, except the first chunk; empty to balance them.

        Raises:
            SpecError: The model has no graph, or no such layers.
            UnsupportedError: A layer would be on both sides of a cut.
        """
        self.model = _functional(model)
        self._nodes = keras_private.nodes_of(self.model)
        self.parts = self._named(first, chunks) if first else self._balanced(chunks)
        require_no_shared_weights([_variables(nodes) for nodes in self.parts])
        _require_own_weights(self.parts)
        self.chunks = self._chunks(self.parts)

    def stage_of_weights(self, stages: int) -> dict[int, int]:
        """Stage of each weight, by the identity of the framework's variable."""
        return {
            id(variable.value): number % stages
            for number, chunk in enumerate(self.chunks)
            for variable in chunk.variables
        }

    def seeds(self, chunk: int) -> list[Any]:
        """Keras variables of a chunk's seed generators, shape `[2]`: seed, and number of draws so far."""
        variables = self.chunks[chunk].variables
        return [each for each in variables if keras_private.is_seed(each.path)]

    def layer_calls(self) -> list[ProfiledCall]:
        """Calls of the layers, in execution order, for profiling."""
        return [_call(node, number) for number, nodes in enumerate(self.parts) for node in nodes]

    def describe(self, stages: int) -> list[str]:
        """One line per chunk: its stage, its layers, and the tensors that it sends."""
        sizes = {id(out): _size(out) for node in self._nodes for out in node.outputs}
        return [
            f"stage {number % stages + 1} of {stages}: {', '.join(chunk.names)};"
            f" {sum(math.prod(weight.shape) for weight in chunk.trainable_variables)} trainable"
            f" parameters; sends {sum(sizes[key] for key in chunk.output_keys)} numbers per sample"
            for number, chunk in enumerate(self.chunks)
        ]

    def inputs(self, inputs: Any) -> dict[Key, Any]:
        """Tensors of a micro-batch's inputs, by key."""
        flat = keras_private.standardized_inputs(self.model, inputs)
        return {id(like): value for like, value in zip(self.model.inputs, flat, strict=True)}

    def outputs(self, tensors: Mapping[Key, Any]) -> Any:
        """The model's outputs, in its structure, selected from the last chunk's tensors."""
        outputs = [tensors[id(like)] for like in self.model.outputs]
        packed = keras.tree.pack_sequence_as(self.model.output, outputs)
        is_single = isinstance(packed, list | tuple) and len(packed) == 1
        return packed[0] if is_single else packed  # as Keras returns it

    def _balanced(self, chunks: int) -> list[list[Any]]:
        """Graph nodes of chunks with similar amounts of computation, as estimated from shapes."""
        node_of = {id(out): index for index, node in enumerate(self._nodes) for out in node.outputs}
        layers = [_layer(node, node_of) for node in self._nodes]
        partition = Partitioner(ModelProfile(layers), bandwidth=1.0).balanced(chunks)
        by_name = {layer.name: node for layer, node in zip(layers, self._nodes, strict=True)}
        return [[by_name[layer.name] for layer in stage.layers] for stage in partition.stages]

    def _named(self, first: Sequence[str], chunks: int) -> list[list[Any]]:
        names = [node.operation.name for node in self._nodes]
        return [
            self._nodes[start:end]
            for start, end in itertools.pairwise(chunk_bounds(names, first, chunks))
        ]

    def _chunks(self, parts: list[list[Any]]) -> list[Chunk]:
        outputs = {id(out) for out in self.model.outputs}
        inputs = {id(tensor) for tensor in self.model.inputs}
        computed: list[Key] = []
        chunks = []
        for number, nodes in enumerate(parts):
            later = [node for part in parts[number + 1 :] for node in part]
            needed = outputs | {id(tensor) for node in later for tensor in node.input_tensors}
            input_keys = [key for key in computed if key in self._crossing(parts, number, outputs)]
            computed += [id(out) for node in nodes for out in node.outputs]
            output_keys = [key for key in computed if key in needed - inputs] if later else []
            chunks.append(Chunk(nodes, input_keys, output_keys))
        return chunks

    def _crossing(self, parts: list[list[Any]], number: int, outputs: set[Key]) -> set[Key]:
        """Keys of the tensors that chunks from this one on need."""
        nodes = [node for part in parts[number:] for node in part]
        return outputs | {id(tensor) for node in nodes for tensor in node.input_tensors}


class KerasPipelineLoss:
    """Losses of chunks: the layers' added losses of each, and the spec's losses of the last."""

    def __init__(
        self, spec: TrainingSpec, staged: KerasPipelineModel, losses: keras_losses.Losses
    ) -> None:
        """Takes the losses that metrics show too, so that each is computed once.

        Args:
            spec: Training spec, for the weights of the losses.
            staged: The split model.
            losses: Losses by output.
        """
        self._model = staged
        self._terms = keras_losses.loss_terms(losses, spec, OutputSelector.of_keras(staged.model))

    def of(self, chunk: Chunk, tensors: Mapping[Key, Any], targets: Any) -> tuple[Any, Any]:
        """Mean loss of a chunk, a scalar; and of the last one, the predictions.

        Args:
            chunk: The chunk.
            tensors: Tensors that it returned, by key.
            targets: Targets of the micro-batch.

        Raises:
            UnsupportedError: The loss is normalized by more than the number of targets.
        """
        added = LayerLosses(chunk)
        if chunk is not self._model.chunks[-1]:
            return added.add_to_loss(keras.ops.zeros((), dtype=keras.config.floatx())), None
        predictions = self._model.outputs(tensors)
        loss = keras_losses.means_and_denominators(
            self._terms(targets, predictions), added.add_to_loss
        )
        if len(loss.shape):
            raise UnsupportedError(MASKED_LOSS)
        return loss, predictions


def _functional(model: Any) -> keras.Model:
    """The functional form of a model.

    Raises:
        SpecError: The model has no graph.
    """
    if isinstance(model, keras.Sequential):
        return keras.Model(model.inputs, model.outputs)
    if keras_private.is_functional(model):
        return model
    raise SpecError(
        f"pipeline: the model is a {type(model).__name__}, which calls its layers in Python code; a model is"
        " split between the layers of its graph. Build it as keras.Sequential or keras.Model(inputs,"
        " outputs)."
    )


def _variables(nodes: Sequence[Any]) -> list[tuple[str, int]]:
    return [
        (node.operation.name, id(variable))
        for node in nodes
        for variable in getattr(node.operation, "variables", ())
    ]


def _require_own_weights(parts: Sequence[Sequence[Any]]) -> None:
    """Refuses functions that read a weight of another chunk through a closure, not through the graph.

    Raises:
        UnsupportedError: A layer has such a function.
    """
    chunk_of = {key: chunk for chunk, nodes in enumerate(parts) for _, key in _variables(nodes)}
    for chunk, nodes in enumerate(parts):
        for node in nodes:
            for variable in _read_by_functions(node.operation):
                if chunk_of.get(id(variable), chunk) != chunk:
                    raise UnsupportedError(
                        f"pipeline: layer {node.operation.name!r} reads the weight {variable.path!r} of a"
                        " layer in another stage, by a function that holds it. Cut the model so that both are"
                        " in one stage (`cut`), or have that layer return what is needed as an output."
                    )


def _read_by_functions(operation: Any) -> list[Any]:
    """Variables in the closure and globals of a custom function: a Lambda's, or a layer class's call."""
    is_keras_own = type(operation).__module__.partition(".")[0] == "keras"
    function = getattr(operation, "function", None if is_keras_own else type(operation).call)
    if not inspect.isfunction(function):
        return []
    closure = inspect.getclosurevars(function)
    values = keras.tree.flatten([*closure.nonlocals.values(), *closure.globals.values()])
    variables = [each for each in values if isinstance(each, keras.Variable)]
    return variables + [
        variable for each in values if isinstance(each, keras.Layer) for variable in each.variables
    ]


def _call(node: Any, chunk: int) -> ProfiledCall:
    operation, input_keys = node.operation, [id(tensor) for tensor in node.input_tensors]

    def compute(*tensors: Any) -> list[Any]:
        args, kwargs = node.arguments.fill_in(dict(zip(input_keys, tensors, strict=True)))
        if isinstance(operation, keras.Layer):
            kwargs["training"] = True
        return keras.tree.flatten(operation(*args, **kwargs))

    trained = [variable.value for variable in getattr(operation, "trainable_variables", ())]
    return ProfiledCall(
        operation.name, chunk, input_keys, list(map(id, node.outputs)), compute, trained
    )


def _layer(node: Any, node_of: Mapping[Key, int]) -> LayerCost:
    """Estimated cost of a layer from shapes: its weights are multiplied at each position of its output."""
    operation = node.operation
    weights = sum(
        math.prod(variable.shape) for variable in getattr(operation, "trainable_variables", ())
    )
    sizes = [_size(out) for out in node.outputs]
    positions = max(
        (math.prod(length or 1 for length in out.shape[1:-1]) for out in node.outputs), default=1
    )
    sources = {node_of[id(tensor)] for tensor in node.input_tensors if id(tensor) in node_of}
    work = float(2 * weights * positions + sum(sizes))
    name = f"{operation.name}#{id(node)}"
    return LayerCost(name, work, 2 * work, sum(sizes), weights, tuple(sorted(sources)))


def _size(tensor: Any) -> int:
    """Number of elements for one sample, as far as the shape tells."""
    return math.prod(length or 1 for length in tensor.shape[1:])
