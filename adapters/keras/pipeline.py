"""A portable model, cut into chunks between the layers of its graph.

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
"""Stands for a tensor of the graph."""


class Chunk(keras.layers.Layer):
    """The layers of a model between two cuts, as a layer.

    Attributes:
        input_keys: What it needs of the chunks before it, or passes on.
        names: Of its layers.
        output_keys: What the chunks behind it need of it and those before it; nothing of the last one.
    """

    def __init__(self, nodes: Sequence[Any], input_keys: list[Key], output_keys: list[Key]) -> None:
        super().__init__(autocast=False)
        self._nodes = tuple(nodes)
        self.inner = [n.operation for n in nodes if isinstance(n.operation, keras.Layer)]
        self.names = tuple(node.operation.name for node in nodes)
        self.input_keys, self.output_keys = tuple(input_keys), tuple(output_keys)
        self.built = True

    def call(self, tensors: Mapping[Key, Any], training: bool | None = None) -> dict[Key, Any]:
        """Computes all tensors of its layers, beside those that are given."""
        known = dict(tensors)
        for node in self._nodes:
            args, kwargs = node.arguments.fill_in(known)
            if isinstance(node.operation, keras.Layer):
                kwargs["training"] = training  # in place of what it was called with in the graph
            found = keras.tree.flatten(node.operation(*args, **kwargs))
            known |= {id(like): value for like, value in zip(node.outputs, found, strict=True)}
        return known

    def boundary_tensors(self, known: Mapping[Key, Any]) -> list[Any]:
        """What it gives to those behind it, of all that it knows.

        Raises:
            UnsupportedError: A part of it has a mask, which would not go along.
        """
        found = [known[key] for key in self.output_keys]
        if any(keras_private.mask_of(each) is not None for each in found):
            raise UnsupportedError(MASK_AT_SPLIT)
        return found


class KerasPipelineModel:
    """A portable model, cut.

    Attributes:
        whole: The model.
        parts: The nodes of each chunk.
        chunks: Of it, from the inputs on.
    """

    def __init__(self, model: keras.Model, chunks: int, first: Sequence[str]) -> None:
        """Cuts a model.

        Args:
            model: Functional or Sequential.
            chunks: How many there are to be.
            first: The names of the layers with which the chunks after the first begin; none to balance them.

        Raises:
            SpecError: The model has no graph, or no such layers.
            UnsupportedError: A layer would be on both sides of a cut.
        """
        self.whole = _functional(model)
        self._nodes = keras_private.nodes_of(self.whole)
        self.parts = self._named(first, chunks) if first else self._balanced(chunks)
        require_no_shared_weights([_variables(nodes) for nodes in self.parts])
        _require_own_weights(self.parts)
        self.chunks = self._chunks(self.parts)

    def stage_of_weights(self, stages: int) -> dict[int, int]:
        """The stage of each weight, by the identity of the framework's own variable."""
        return {
            id(variable.value): number % stages
            for number, chunk in enumerate(self.chunks)
            for variable in chunk.variables
        }

    def layer_calls(self) -> list[ProfiledCall]:
        """Of its layers, in their order."""
        return [_call(node, number) for number, nodes in enumerate(self.parts) for node in nodes]

    def describe(self, stages: int) -> list[str]:
        """Of each chunk where it is, its layers, and what it sends: a line each."""
        sizes = {id(out): _size(out) for node in self._nodes for out in node.outputs}
        return [
            f"stage {number % stages + 1} of {stages}: {', '.join(chunk.names)};"
            f" {sum(math.prod(v.shape) for v in chunk.trainable_variables)} trainable numbers; sends"
            f" {sum(sizes[key] for key in chunk.output_keys)} numbers for a sample"
            for number, chunk in enumerate(self.chunks)
        ]

    def inputs(self, given: Any) -> dict[Key, Any]:
        """The tensors of a slice's inputs."""
        flat = keras_private.standardized_inputs(self.whole, given)
        return {id(like): value for like, value in zip(self.whole.inputs, flat, strict=True)}

    def outputs(self, known: Mapping[Key, Any]) -> Any:
        """What the model gives, of the tensors that the last chunk knows."""
        found = [known[id(like)] for like in self.whole.outputs]
        packed = keras.tree.pack_sequence_as(self.whole.output, found)
        is_alone = isinstance(packed, list | tuple) and len(packed) == 1
        return packed[0] if is_alone else packed  # as Keras gives it

    def _balanced(self, chunks: int) -> list[list[Any]]:
        """By what each layer computes, as far as its shapes tell."""
        places = {id(out): n for n, node in enumerate(self._nodes) for out in node.outputs}
        layers = [_layer(node, places) for node in self._nodes]
        found = Partitioner(ModelProfile(layers), bandwidth=1.0).balanced(chunks)
        by_name = {layer.name: node for layer, node in zip(layers, self._nodes, strict=True)}
        return [[by_name[layer.name] for layer in stage.layers] for stage in found.stages]

    def _named(self, first: Sequence[str], chunks: int) -> list[list[Any]]:
        names = [node.operation.name for node in self._nodes]
        return [self._nodes[a:b] for a, b in itertools.pairwise(chunk_bounds(names, first, chunks))]

    def _chunks(self, parts: list[list[Any]]) -> list[Chunk]:
        outputs = {id(out) for out in self.whole.outputs}
        inputs = {id(each) for each in self.whole.inputs}
        made: list[Key] = []
        chunks = []
        for number, nodes in enumerate(parts):
            behind = [node for part in parts[number + 1 :] for node in part]
            needed = outputs | {id(t) for node in behind for t in node.input_tensors}
            takes = [key for key in made if key in self._crossing(parts, number, outputs)]
            made += [id(out) for node in nodes for out in node.outputs]
            gives = [key for key in made if key in needed - inputs] if behind else []
            chunks.append(Chunk(nodes, takes, gives))
        return chunks

    def _crossing(self, parts: list[list[Any]], number: int, outputs: set[Key]) -> set[Key]:
        """What chunks from this one on need."""
        nodes = [node for part in parts[number:] for node in part]
        return outputs | {id(tensor) for node in nodes for tensor in node.input_tensors}


class KerasPipelineLoss:
    """The losses of chunks: of the last one that of targets and predictions; of each, its layers'."""

    def __init__(
        self, spec: TrainingSpec, staged: KerasPipelineModel, losses: keras_losses.Losses
    ) -> None:
        """Takes the losses that are measured too: so each is computed once.

        Args:
            spec: Gives their weights.
            staged: The model.
            losses: By output.
        """
        self._model = staged
        self._parts = keras_losses.loss_terms(losses, spec, OutputSelector.of_keras(staged.whole))

    def of(self, chunk: Chunk, known: Mapping[Key, Any], targets: Any) -> tuple[Any, Any]:
        """The mean loss of a chunk; and of the last one, the predictions.

        Args:
            chunk: One.
            known: What it gave.
            targets: Of the micro-batch.

        Raises:
            UnsupportedError: It counts targets by more than their number.
        """
        own = LayerLosses(chunk)
        if chunk is not self._model.chunks[-1]:
            return own.add_to_loss(keras.ops.zeros((), dtype=keras.config.floatx())), None
        predictions = self._model.outputs(known)
        found = keras_losses.means_and_denominators(
            self._parts(targets, predictions), own.add_to_loss
        )
        if len(found.shape):
            raise UnsupportedError(MASKED_LOSS)
        return found, predictions


def _functional(model: Any) -> keras.Model:
    """The graph of a model.

    Raises:
        SpecError: It has none.
    """
    if isinstance(model, keras.Sequential):
        return keras.Model(model.inputs, model.outputs)
    if keras_private.is_functional(model):
        return model
    raise SpecError(
        f"pipeline: the model is a {type(model).__name__}, whose layers Python calls; a model is cut between"
        " the layers of its graph. Build it as keras.Sequential or keras.Model(inputs, outputs)."
    )


def _variables(nodes: Sequence[Any]) -> list[tuple[str, int]]:
    return [
        (node.operation.name, id(variable))
        for node in nodes
        for variable in getattr(node.operation, "variables", ())
    ]


def _require_own_weights(parts: Sequence[Sequence[Any]]) -> None:
    """Refuses functions that read a weight of another chunk, past the graph: it may not be there.

    Raises:
        UnsupportedError: A layer has one.
    """
    homes = {key: place for place, nodes in enumerate(parts) for _, key in _variables(nodes)}
    for place, nodes in enumerate(parts):
        for node in nodes:
            for variable in _read_by_functions(node.operation):
                if homes.get(id(variable), place) != place:
                    raise UnsupportedError(
                        f"pipeline: layer {node.operation.name!r} reads the weight {variable.path!r} of a"
                        " layer in another stage, by a function that holds it. Cut the model so that both are"
                        " in one stage (`cut`), or have that layer give what is needed as an output."
                    )


def _read_by_functions(operation: Any) -> list[Any]:
    """The variables that a person's function, of a Lambda or of a layer's class, has from around it."""
    is_keras_own = type(operation).__module__.partition(".")[0] == "keras"
    function = getattr(operation, "function", None if is_keras_own else type(operation).call)
    if not inspect.isfunction(function):
        return []
    around = inspect.getclosurevars(function)
    held = keras.tree.flatten([*around.nonlocals.values(), *around.globals.values()])
    variables = [each for each in held if isinstance(each, keras.Variable)]
    return variables + [v for each in held if isinstance(each, keras.Layer) for v in each.variables]


def _call(node: Any, chunk: int) -> ProfiledCall:
    operation, takes = node.operation, [id(tensor) for tensor in node.input_tensors]

    def compute(*tensors: Any) -> list[Any]:
        args, kwargs = node.arguments.fill_in(dict(zip(takes, tensors, strict=True)))
        if isinstance(operation, keras.Layer):
            kwargs["training"] = True
        return keras.tree.flatten(operation(*args, **kwargs))

    trained = [variable.value for variable in getattr(operation, "trainable_variables", ())]
    return ProfiledCall(operation.name, chunk, takes, list(map(id, node.outputs)), compute, trained)


def _layer(node: Any, places: Mapping[Key, int]) -> LayerCost:
    """What the shapes tell of a layer: it multiplies its weights at each place of what it gives."""
    operation = node.operation
    weights = sum(math.prod(v.shape) for v in getattr(operation, "trainable_variables", ()))
    sizes = [_size(out) for out in node.outputs]
    spots = max((math.prod(n or 1 for n in out.shape[1:-1]) for out in node.outputs), default=1)
    sources = {places[id(t)] for t in node.input_tensors if id(t) in places}
    work = float(2 * weights * spots + sum(sizes))
    name = f"{operation.name}#{id(node)}"
    return LayerCost(name, work, 2 * work, sum(sizes), weights, tuple(sorted(sources)))


def _size(tensor: Any) -> int:
    """Numbers for one sample, as far as the shape tells."""
    return math.prod(n or 1 for n in tensor.shape[1:])
