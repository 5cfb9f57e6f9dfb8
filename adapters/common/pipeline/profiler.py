"""Profiles the layers of a model that is to be split into stages; imports no framework."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.plugin import LayerCost, ModelProfile, PassCosts

Compute = Callable[..., list[Any]]
"""A layer, as a function of its input tensors."""
BuildPasses = Callable[
    [Compute, Sequence[Any], Sequence[Any]], tuple[Callable[[], Any], Callable[[], Any]]
]
"""`build(compute, inputs, trained)`: returns a function that runs the forward pass and returns its outputs,
and one that runs both passes; each returns once the device is done."""
_TIMES = 3
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
    inputs: Mapping[Any, Any],
    passes: BuildPasses,
    costs_of: Callable[[Callable[[], Any]], PassCosts] | None = None,
) -> ModelProfile:
    """Measures the time of each layer's forward and backward pass, or estimates it by its costs.

    Args:
        calls: Calls of the layers, in an order in which they can be computed.
        inputs: Input tensors of the model, by key.
        passes: Builds a layer's passes for the framework.
        costs_of: Calls a function and returns its costs, by which its time is estimated; None: measure it.

    Returns:
        Costs of the layers: seconds, bytes of outputs and weights, and dependencies.
    """

    def seconds_of(call: Callable[[], Any]) -> float:
        return _fastest(call) if costs_of is None else _estimated(costs_of(call))

    tensors = dict(inputs)
    layer_of: dict[Hashable, int] = {}
    layers: list[LayerCost] = []
    for call in calls:
        forward, both = passes(
            call.compute, [tensors[key] for key in call.input_keys], call.trained
        )
        outputs, seconds = forward(), seconds_of(forward)
        tensors |= dict(zip(call.output_keys, outputs, strict=True))
        layer = LayerCost(
            call.name,
            seconds,
            max(0.0, seconds_of(both) - seconds),
            sum(map(_bytes, outputs)),
            sum(map(_bytes, call.trained)),
            tuple(sorted({layer_of[key] for key in call.input_keys if key in layer_of})),
            call.chunk,
        )
        layer_of |= dict.fromkeys(call.output_keys, len(layers))
        layers.append(layer)
    return ModelProfile(layers)


def _fastest(call: Callable[[], Any]) -> float:
    """Shortest time of a few calls in seconds, after one warm-up call, which may compile something."""
    call()
    durations = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        call()
        durations.append(time.perf_counter() - begin)
    return min(durations)


def _estimated(costs: PassCosts) -> float:
    """Seconds of operations with these costs."""
    return max(costs.flops / _FLOPS, costs.moved_bytes / _MEMORY_RATE)


def _bytes(tensor: Any) -> int:
    dtype = tensor.dtype
    return math.prod(tensor.shape) * (dtype.itemsize if hasattr(dtype, "itemsize") else dtype.size)
