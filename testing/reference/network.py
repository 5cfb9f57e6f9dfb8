"""Networks of layers: what a spec's `model` function returns for this backend."""

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
    """Sequence of layers on one of several inputs.

    Attributes:
        input: Name of the input.
        layers: Layers in order: the first gets the input, the last gives the output.
    """

    input: str
    layers: Sequence[Layer]


class Network:
    """Sequential network, or one sequence (`Branch`) for each of several outputs.

    Called with inputs, shape [samples, ...], it returns outputs: an array for an array, a dict for a dict.

    Attributes:
        training: Whether calls run in training mode.
        trainable: Weights by name, `LAYER/WEIGHT`; they are written in place.
        statistics: Moving statistics by name, updated by forward passes in training; written in place.
        fixed: Frozen weights and statistics by name; written in place.
        draws: Number of draws of each random layer by name, int64 scalars; written in place.
    """

    def __init__(self, layers: Sequence[Layer] | Mapping[str, Branch]) -> None:
        """Connects layers; `start` initializes their weights.

        Args:
            layers: Layers of one sequence; or a branch for each output, by the output's name.

        Raises:
            SpecError: Two layers have the same name.
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
        """Initializes weights from the seed alone, in `dtype`; seeds random layers for the replica."""
        draw = random.Random(seed)
        for layer in self._layers:
            layer.start(draw)
            for arrays in (layer.weights, layer.statistics):
                arrays.update({name: value.astype(dtype) for name, value in arrays.items()})
            self.trainable |= _named(layer, layer.weights)
            self.statistics |= _named(layer, layer.statistics)
            if isinstance(layer, Dropout):
                self.draws |= _named(layer, {"draws": layer.draws})
        self.reseed(seed, replica, 0)

    def reseed(self, seed: int, replica: int, step: int) -> None:
        """Seeds the random layers for a replica and a step."""
        for index, layer in enumerate(self._layers):
            if isinstance(layer, Dropout):
                layer.key = (seed, (replica << 32) + index)
                layer.draws[...] = step << 32

    def freeze(self, is_frozen: Callable[[str], bool]) -> None:
        """Moves the weights and statistics whose names match to `fixed`."""
        for layer in self._layers:
            layer.frozen = any(map(is_frozen, _named(layer, layer.statistics)))
        for arrays in (self.trainable, self.statistics):
            self.fixed |= {name: arrays.pop(name) for name in list(filter(is_frozen, arrays))}

    def __call__(self, inputs: Any) -> Any:
        """Forward pass: outputs for samples, shape [samples, ...]."""
        by_name = {"": inputs} if self._is_row else inputs
        results = {
            name: self._forward(by_name[branch.input], branch.layers)
            for name, branch in self._branches.items()
        }
        return results[""] if self._is_row else results

    def _forward(self, inputs: Array, layers: Iterable[Layer]) -> Array:
        """Forward pass through layers, shapes `[samples, ...]`."""
        for layer in layers:
            inputs = layer.forward(inputs, self.training and not layer.frozen)
        return inputs

    def backward(self, slopes: Any) -> list[Array]:
        """Backward pass after a call: gradients of the trainable weights, in order, in their shapes.

        Args:
            slopes: Derivatives of the loss by the outputs, in their shapes; missing outputs count as zero.
        """
        by_output, gradients = {"": slopes} if self._is_row else slopes, dict[str, Array]()
        for name, branch in self._branches.items():
            slope = by_output.get(name)
            if slope is None:
                continue
            for layer in reversed(branch.layers):
                slope = layer.backward(slope)
                gradients |= _named(layer, layer.gradients)
        return [gradients.get(name, np.zeros_like(w)) for name, w in self.trainable.items()]

    def skip_draws(self) -> None:
        """Advances random layers as a call would, so that replicas without samples stay in step."""
        for layer in self._layers:
            if isinstance(layer, Dropout):
                layer.skip_draws()

    def traits(self) -> list[LayerTrait]:
        """Layer traits that affect whether runs agree (randomness, local statistics)."""
        return [
            LayerTrait(layer.trait, layer.name, type(layer).__name__)
            for layer in self._layers
            if layer.trait is not None
        ]


def _named(layer: Layer, values: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays of a layer, in their shapes, by the names that they have in the model."""
    return {f"{layer.name}/{name}": value for name, value in values.items()}
