"""Profiles the layers of a model that is to be split into stages; imports no framework."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from isotrain.plugin import LayerCost, ModelProfile, PassCosts

Compute = Callable[..., list[Any]]
"""A layer, as a function of its input tensors."""
BuildPasses = Callable[
    [Compute, Sequence[Any], Sequence[bool], Sequence[Any]],
    tuple[Callable[[], Any], Callable[[], Any]],
]
"""`build(compute, inputs, differentiable, trained)`: returns a function that runs the forward pass and
returns its outputs, and one that runs both passes, with gradients of those inputs that are differentiable;
each returns once the device is done."""
ROUNDS = 5
"""Rounds of which the median is taken."""
_FLOPS, _MEMORY_RATE = 100e12, 3e12
"""Operations and bytes per second by which layers are estimated: of the order of a GPU of a data centre."""


@dataclass(frozen=True)
class ProfiledCall:
    """A call of a layer in a model.

    Attributes:
        name: Name of the layer.
        chunk: Index of its chunk.
        input_keys: Keys of the tensors that it takes.
        output_keys: Keys of the tensors that it returns.
        compute: The layer, as a function of tensors.
        trained: Trainable variables of the layer, as the framework has them.
    """

    name: str
    chunk: int
    input_keys: Sequence[Hashable]
    output_keys: Sequence[Hashable]
    compute: Compute
    trained: Sequence[Any]


def profile_calls(
    calls: Iterable[ProfiledCall],
    tensors: dict[Any, Any],
    passes: BuildPasses,
    costs_of: Callable[[Callable[[], Any]], PassCosts] | None = None,
) -> ModelProfile:
    """Measures the time of each layer's forward and backward pass, or estimates it by its costs.

    Args:
        calls: Calls of the layers, in an order in which they can be computed.
        tensors: Input tensors of the model, by key; outputs of the layers are added.
        passes: Builds a layer's passes for the framework.
        costs_of: Calls a function and returns its costs, by which its time is estimated; None: measure it.

    Returns:
        Costs of the layers: seconds, bytes of outputs and weights, and dependencies.
    """
    forwards: list[Callable[[], Any]] = []
    boths: list[Callable[[], Any]] = []

    def run(call: ProfiledCall, inputs: Sequence[Any], differentiable: Sequence[bool]) -> Any:
        forward, both = passes(call.compute, inputs, differentiable, call.trained)
        forwards.append(forward)
        boths.append(both)
        return forward()

    layers = described_calls(calls, tensors, run)
    seconds = seconds_in_turn if costs_of is None else partial(_estimated_seconds, costs_of)
    return ModelProfile(
        [
            replace(layer, forward=forward, backward=max(0.0, both - forward))
            for layer, forward, both in zip(layers, seconds(forwards), seconds(boths), strict=True)
        ]
    )


def described_calls(
    calls: Iterable[ProfiledCall],
    tensors: dict[Any, Any],
    run: Callable[[ProfiledCall, Sequence[Any], Sequence[bool]], Sequence[Any]],
) -> list[LayerCost]:
    """Layers with their bytes and dependencies, and without times.

    Args:
        calls: Calls of the layers, in an order in which they can be computed.
        tensors: Input tensors of the model, by key; outputs of the layers are added.
        run: `run(call, inputs, differentiable)`: returns the outputs of a call, given its input tensors, and
            whether a step needs the gradient of each.
    """
    layer_of: dict[Hashable, int] = {}
    has_gradient: set[Hashable] = set()
    layers: list[LayerCost] = []
    for call in calls:
        differentiable = [
            key in has_gradient or (key in layer_of and layers[layer_of[key]].chunk != call.chunk)
            for key in call.input_keys
        ]
        outputs = run(call, [tensors[key] for key in call.input_keys], differentiable)
        tensors |= dict(zip(call.output_keys, outputs, strict=True))
        layer = LayerCost(
            *(call.name, 0.0, 0.0),
            sum(map(_bytes, outputs)),
            sum(map(_bytes, call.trained)),
            tuple(sorted({layer_of[key] for key in call.input_keys if key in layer_of})),
            call.chunk,
        )
        layer_of |= dict.fromkeys(call.output_keys, len(layers))
        if call.trained or any(differentiable):
            has_gradient.update(call.output_keys)
        layers.append(layer)
    return layers


def with_updates(
    layers: Sequence[LayerCost], seconds: Sequence[float], loss_seconds: float
) -> ModelProfile:
    """The profile of layers and of what a step does beside them.

    Args:
        layers: Layers with the times of their passes.
        seconds: Seconds of the update of each chunk; layers share them by the bytes of their weights.
        loss_seconds: Seconds of the loss and the metrics of a micro-batch.
    """
    weight_bytes = [0] * len(seconds)
    for layer in layers:
        weight_bytes[layer.chunk] += layer.weight_bytes
    return ModelProfile(
        [
            replace(
                layer,
                update=seconds[layer.chunk]
                * layer.weight_bytes
                / max(1, weight_bytes[layer.chunk]),
            )
            for layer in layers
        ],
        loss_seconds,
    )


def seconds_in_turn(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Median time of each call in a few rounds in seconds, after one that may compile something.

    The calls take turns, as the layers of a model do. A layer that is called several times in a row is
    faster, as its weights are in the processor's cache.
    """
    rounds = []
    for _ in range(1 + ROUNDS):
        durations = []
        for call in calls:
            begin = time.perf_counter()
            call()
            durations.append(time.perf_counter() - begin)
        rounds.append(durations)
    return [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def _estimated_seconds(
    costs_of: Callable[[Callable[[], Any]], PassCosts], calls: Sequence[Callable[[], Any]]
) -> list[float]:
    """Seconds of calls by their costs."""
    costs = map(costs_of, calls)
    return [max(each.flops / _FLOPS, each.moved_bytes / _MEMORY_RATE) for each in costs]


def _bytes(tensor: Any) -> int:
    dtype = tensor.dtype
    return math.prod(tensor.shape) * (dtype.itemsize if hasattr(dtype, "itemsize") else dtype.size)
