"""Functional models: graphs of layers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras.src.models.functional import Functional

from isotrain.adapters.common.private_api import PrivateApiProbe, require


def is_functional(model: Any) -> bool:
    """Whether a model is a functional model."""
    return isinstance(model, Functional)


def nodes_of(model: keras.Model) -> list[Any]:
    """Graph nodes (calls of layers and operations) of a functional model, in topological order."""
    by_depth = model._nodes_by_depth
    ordered = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in ordered if node.operation and not node.is_input]


def standardized_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """A functional model's inputs as a flat list of tensors, converted and reshaped as its call does."""
    return list(model._standardize_inputs(inputs))


def _knows_graphs() -> None:
    first, second = keras.layers.Dense(2), keras.layers.Dense(1)
    inputs = keras.Input((3,))
    hidden = first(inputs)
    model = keras.Model(inputs, keras.ops.add(second(hidden), hidden))
    require(is_functional(model) and not is_functional(keras.Sequential()), "graphs of layers")
    nodes = nodes_of(model)
    require([node.operation for node in nodes[:2]] == [first, second], "layers in their order")
    computed = {id(inputs): standardized_inputs(model, np.ones((1, 3)))[0]}
    for node in nodes:
        args, kwargs = node.arguments.fill_in(computed)
        computed[id(node.outputs[0])] = node.operation(*args, **kwargs)
    output = computed[id(model.outputs[0])]
    require(bool(keras.ops.all(output == model(np.ones((1, 3))))), "the model, call by call")


PROBES = (PrivateApiProbe("Functional._nodes_by_depth and _standardize_inputs", _knows_graphs),)
