"""How long the layers of a model that is cut into stages take, one by one; imports no framework."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.plugin import LayerCost, ModelProfile

Compute = Callable[..., list[Any]]
"""A layer, as a function of the tensors it takes."""
BuildPasses = Callable[
    [Compute, Sequence[Any], Sequence[Any]], tuple[Callable[[], Any], Callable[[], Any]]
]
"""Makes of it, of tensors and of the layer's trainable variables what takes the forward pass, which gives its
results, and what takes both passes; each returns once they are done."""
_TIMES = 3


@dataclass(frozen=True)
class ProfiledCall:
    """A layer, where it is called in a model.

    Attributes:
        name: Of the layer.
        chunk: In which it is.
        input_keys: What stands for the tensors that it takes.
        output_keys: The same, of those that it gives.
        compute: The layer.
        trained: Its trainable variables, as the framework has them.
    """

    name: str
    chunk: int
    input_keys: Sequence[Hashable]
    output_keys: Sequence[Hashable]
    compute: Compute
    trained: Sequence[Any]


def profile_calls(
    calls: Iterable[ProfiledCall], inputs: Mapping[Any, Any], passes: BuildPasses
) -> ModelProfile:
    """Takes the layers of a model through both passes, each several times.

    Args:
        calls: Of the layers, in an order in which they can be computed.
        inputs: The tensors that the model takes, by what stands for them.
        passes: How the framework does it.
    """
    known = dict(inputs)
    places: dict[Hashable, int] = {}
    layers: list[LayerCost] = []
    for call in calls:
        forward, both = passes(call.compute, [known[key] for key in call.input_keys], call.trained)
        found, seconds = forward(), _fastest(forward)
        known |= dict(zip(call.output_keys, found, strict=True))
        layer = LayerCost(
            call.name,
            seconds,
            max(0.0, _fastest(both) - seconds),
            sum(map(_bytes, found)),
            sum(map(_bytes, call.trained)),
            tuple(sorted({places[key] for key in call.input_keys if key in places})),
            call.chunk,
        )
        places |= dict.fromkeys(call.output_keys, len(layers))
        layers.append(layer)
    return ModelProfile(layers)


def _fastest(call: Callable[[], Any]) -> float:
    """Of a few; the first one, which may compile something, does not count."""
    call()
    found = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def _bytes(tensor: Any) -> int:
    dtype = tensor.dtype
    return math.prod(tensor.shape) * (dtype.itemsize if hasattr(dtype, "itemsize") else dtype.size)
