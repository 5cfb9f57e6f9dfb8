"""What a spec's `model` gives for this backend: a network of layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.plugin import LayerTrait, SpecError
from isotrain.testing.reference.layers import Array, Dropout, Layer


@dataclass(frozen=True)
class Branch:
    """Layers one after the other, on one of several inputs.

    Attributes:
        input: Its name.
        layers: The first gets it, the last gives the output.
    """

    input: str
    layers: Sequence[Layer]


class Network:
    """Layers in a row; or a row for each of several outputs.

    Called with inputs, it gives outputs: an array for an array, a dict for a dict.

    Attributes:
        training: Whether calls are those of training.
        trainable: The weights by name, `LAYER/WEIGHT`; they are written in place.
        statistics: What forward passes move in training, likewise.
        fixed: Weights and statistics that are frozen, likewise.
        draws: How often each random layer has drawn, likewise.
    """

    def __init__(self, layers: Sequence[Layer] | Mapping[str, Branch]) -> None:
        """Puts layers together; weights are made by `start`.

        Args:
            layers: In a row; or, by the name of each output, a branch of their own.

        Raises:
            SpecError: Two layers have one name.
        """
        self._is_row = not isinstance(layers, Mapping)
        self._branches = layers if isinstance(layers, Mapping) else {"": Branch("", layers)}
        self._layers = [layer for branch in self._branches.values() for layer in branch.layers]
        names = [layer.name for layer in self._layers]
        if len({*names}) < len(names):
            raise SpecError(f"model: each layer needs a name of its own, received {names}.")
        self.training = False
        self.trainable: dict[str, Array] = {}
        self.statistics: dict[str, Array] = {}
        self.fixed: dict[str, Array] = {}
        self.draws: dict[str, Array] = {}

    def start(self, seed: int, replica: int, dtype: str) -> None:
        """Makes the weights: a function of the seed alone. Random layers are the replica's own."""
        draw = random.Random(seed)
        for layer in self._layers:
            layer.start(draw)
            for own in (layer.weights, layer.statistics):
                own.update({name: value.astype(dtype) for name, value in own.items()})
            self.trainable |= _named(layer, layer.weights)
            self.statistics |= _named(layer, layer.statistics)
            if isinstance(layer, Dropout):
                self.draws |= _named(layer, {"draws": layer.draws})
        self.reseed(seed, replica, 0)

    def reseed(self, seed: int, replica: int, step: int) -> None:
        """Has random layers draw from here on what a replica draws in a step."""
        for place, layer in enumerate(self._layers):
            if isinstance(layer, Dropout):
                layer.key = (seed, (replica << 32) + place)
                layer.draws[...] = step << 32

    def freeze(self, is_frozen: Callable[[str], bool]) -> None:
        """Has weights and statistics stay as they are, by their names."""
        for layer in self._layers:
            layer.frozen = any(map(is_frozen, _named(layer, layer.statistics)))
        for own in (self.trainable, self.statistics):
            self.fixed |= {name: own.pop(name) for name in list(filter(is_frozen, own))}

    def __call__(self, inputs: Any) -> Any:
        """The outputs for some samples."""
        given = {"": inputs} if self._is_row else inputs
        results = {
            name: self._forward(given[branch.input], branch.layers)
            for name, branch in self._branches.items()
        }
        return results[""] if self._is_row else results

    def _forward(self, inputs: Array, layers: Iterable[Layer]) -> Array:
        for layer in layers:
            inputs = layer.forward(inputs, self.training and not layer.frozen)
        return inputs

    def backward(self, slopes: Any) -> list[Array]:
        """The gradients of the trainable weights, in order, after a call.

        Args:
            slopes: The derivative of the loss by the outputs; one that a dict lacks is zero.
        """
        given, found = {"": slopes} if self._is_row else slopes, dict[str, Array]()
        for name, branch in self._branches.items():
            slope = given.get(name)
            if slope is None:
                continue
            for layer in reversed(branch.layers):
                slope = layer.backward(slope)
                found |= _named(layer, layer.gradients)
        return [found.get(name, np.zeros_like(own)) for name, own in self.trainable.items()]

    def skip_draws(self) -> None:
        """Lets random layers go on, as a call would: so they stay together on all replicas."""
        for layer in self._layers:
            if isinstance(layer, Dropout):
                layer.skip_draws()

    def traits(self) -> list[LayerTrait]:
        """What its layers do that bears on whether runs agree."""
        return [
            LayerTrait(layer.trait, layer.name, type(layer).__name__)
            for layer in self._layers
            if layer.trait is not None
        ]


def _named(layer: Layer, values: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{layer.name}/{name}": value for name, value in values.items()}
