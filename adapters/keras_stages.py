"""A portable model, cut into chunks between the layers of its graph.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from isotrain.adapters import keras_private
from isotrain.plugin import LayerCost, ModelProfile, Partitioner, SpecError, UnsupportedError

Key = int
"""Stands for a tensor of the graph."""


class Chunk(keras.layers.Layer):
    """The layers of a model between two cuts, as a layer.

    Attributes:
        takes: What it needs of the chunks before it, or passes on.
        names: Of its layers.
        gives: What the chunks behind it need of it and those before it; nothing of the last one.
    """

    def __init__(self, nodes: Sequence[Any], takes: list[Key], gives: list[Key]) -> None:
        super().__init__(autocast=False)
        self._nodes = tuple(nodes)
        self.inner = [n.operation for n in nodes if isinstance(n.operation, keras.Layer)]
        self.names = tuple(node.operation.name for node in nodes)
        self.takes, self.gives = tuple(takes), tuple(gives)
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


class StagedModel:
    """A portable model, cut.

    Attributes:
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
        self._model = _functional(model)
        self._nodes = keras_private.nodes_of(self._model)
        parts = self._named(first) if first else self._balanced(chunks)
        if len(parts) != chunks:
            raise SpecError(f"pipeline: {len(parts)} chunks by `cut`; expected {chunks}.")
        _require_apart(parts)
        self.chunks = self._chunks(parts)

    def described(self, stages: int) -> list[str]:
        """Of each chunk where it is, its layers, and what it sends: a line each."""
        sizes = {id(out): _size(out) for node in self._nodes for out in node.outputs}
        return [
            f"stage {number % stages + 1} of {stages}: {', '.join(chunk.names)};"
            f" {sum(math.prod(v.shape) for v in chunk.trainable_variables)} trainable numbers; sends"
            f" {sum(sizes[key] for key in chunk.gives)} numbers for a sample"
            for number, chunk in enumerate(self.chunks)
        ]

    def inputs(self, given: Any) -> dict[Key, Any]:
        """The tensors of a slice's inputs."""
        flat = keras_private.standardised_inputs(self._model, given)
        return {id(like): value for like, value in zip(self._model.inputs, flat, strict=True)}

    def outputs(self, known: Mapping[Key, Any]) -> Any:
        """What the model gives, of the tensors that the last chunk knows."""
        found = [known[id(like)] for like in self._model.outputs]
        packed = keras.tree.pack_sequence_as(self._model.output, found)
        is_alone = isinstance(packed, list | tuple) and len(packed) == 1
        return packed[0] if is_alone else packed  # as Keras gives it

    def _balanced(self, chunks: int) -> list[list[Any]]:
        """By what each layer computes, as far as its shapes tell."""
        places = {id(out): n for n, node in enumerate(self._nodes) for out in node.outputs}
        layers = [_layer(node, places) for node in self._nodes]
        found = Partitioner(ModelProfile(layers), bandwidth=1.0).balanced(chunks)
        by_name = {layer.name: node for layer, node in zip(layers, self._nodes, strict=True)}
        return [[by_name[layer.name] for layer in stage.layers] for stage in found.stages]

    def _named(self, first: Sequence[str]) -> list[list[Any]]:
        names = [node.operation.name for node in self._nodes]
        for name in first:
            if name not in names:
                raise SpecError(f"pipeline: cut at {name!r}; the layers are {', '.join(names)}.")
        bounds = [0, *sorted(names.index(name) for name in first), len(names)]
        return [self._nodes[a:b] for a, b in itertools.pairwise(bounds)]

    def _chunks(self, parts: list[list[Any]]) -> list[Chunk]:
        outputs = {id(out) for out in self._model.outputs}
        inputs = {id(each) for each in self._model.inputs}
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


def _require_apart(parts: list[list[Any]]) -> None:
    """Refuses layers whose weights would be on several stages.

    Raises:
        UnsupportedError: There is one.
    """
    home: dict[int, int] = {}
    for number, nodes in enumerate(parts):
        for node in nodes:
            for variable in getattr(node.operation, "variables", ()):
                if home.setdefault(id(variable), number) != number:
                    raise UnsupportedError(
                        f"pipeline: the layer {node.operation.name} is called on both sides of a cut, and its"
                        " weights would be on two stages. Cut elsewhere, by the option `cut`."
                    )
