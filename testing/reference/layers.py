"""Layers with hand-written gradients and Keras' initial weights."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from isotrain.plugin import Trait

Array = np.ndarray[Any, Any]
Activation = Literal["linear", "tanh", "relu", "sigmoid"]

_ACTIVATIONS: Mapping[Activation, tuple[Callable[[Array], Array], Callable[[Array], Any]]] = {
    "linear": (lambda x: x, lambda y: 1),
    "tanh": (np.tanh, lambda y: 1 - y * y),
    "relu": (lambda x: np.maximum(x, 0), lambda y: y > 0),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda y: y * (1 - y)),
}
"""Activations by name: the function, and its derivative as a function of its result."""
_SEEDS = int(1e9)
_EPSILON = 1e-3


class Layer(ABC):
    """Layer with a forward and a backward pass.

    Attributes:
        name: Layer name, the prefix of its weights' names.
        trait: Layer trait that affects whether runs agree (randomness, local statistics), or None.
        weights: Trainable arrays by name; the network shares these arrays, and they are written in place.
        statistics: Moving statistics by name, updated by forward passes in training; shared likewise.
        gradients: Gradients of the weights by name, from the last `backward`.
        frozen: Whether the statistics are frozen: it then works in training as in evaluation.
    """

    trait: ClassVar[Trait | None] = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights: dict[str, Array] = {}
        self.statistics: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self.frozen = False

    def start(self, draw: random.Random) -> None:  # noqa: B027  # a layer may have no weights
        """Initializes weights and statistics, in float64.

        Args:
            draw: Generator of the seed of each randomly initialized weight.
        """

    @abstractmethod
    def forward(self, inputs: Array, training: bool) -> Array:
        """Result of the layer, shape `[samples, ...]`; saves what `backward` needs."""

    @abstractmethod
    def backward(self, slope: Array) -> Array:
        """Stores the gradients of the weights; returns that of the inputs, in their shape.

        Args:
            slope: Derivative of the loss by the result of the last `forward`, in its shape.
        """


class Dense(Layer):
    """Dense layer: kernel of shape [inputs, outputs], bias of shape [outputs], activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: Activation = "linear",
        *,
        bias: bool = True,
        name: str = "dense",
    ) -> None:
        super().__init__(name)
        self._shape = (inputs, outputs)
        self._function, self._derivative = _ACTIVATIONS[activation]
        self._bias = bias

    def start(self, draw: random.Random) -> None:
        self.weights["kernel"] = _uniform(draw, self._shape, math.sqrt(6 / sum(self._shape)))
        if self._bias:
            self.weights["bias"] = np.zeros(self._shape[1])

    def forward(self, inputs: Array, training: bool) -> Array:
        self._inputs = inputs
        sums = inputs @ self.weights["kernel"]
        self._result = self._function(sums + self.weights["bias"] if self._bias else sums)
        return self._result

    def backward(self, slope: Array) -> Array:
        slope = slope * self._derivative(self._result)
        flat = slope.reshape(-1, slope.shape[-1])
        self.gradients["kernel"] = self._inputs.reshape(-1, self._shape[0]).T @ flat
        if self._bias:
            self.gradients["bias"] = flat.sum(axis=0)
        return np.asarray(slope @ self.weights["kernel"].T)


class Embedding(Layer):
    """Embedding: a table of shape [rows, size], looked up by integer indices of any shape."""

    def __init__(self, rows: int, size: int, *, name: str = "embedding") -> None:
        super().__init__(name)
        self._shape = (rows, size)

    def start(self, draw: random.Random) -> None:
        self.weights["embeddings"] = _uniform(draw, self._shape, 0.05)

    def forward(self, inputs: Array, training: bool) -> Array:
        self._inputs = inputs
        return np.asarray(self.weights["embeddings"][inputs])

    def backward(self, slope: Array) -> Array:
        self.gradients["embeddings"] = np.zeros_like(self.weights["embeddings"])
        np.add.at(self.gradients["embeddings"], self._inputs, slope)
        return np.zeros(self._inputs.shape)  # whole numbers have no gradient


class BatchNormalization(Layer):
    """Batch normalization over axis 0, without scale and offset; moving statistics of shape [size]."""

    trait = Trait.LOCAL_STATISTICS

    def __init__(self, size: int, momentum: float = 0.99, *, name: str = "normalization") -> None:
        super().__init__(name)
        self._size = size
        self._momentum = momentum

    def start(self, draw: random.Random) -> None:
        self.statistics = {
            "moving_mean": np.zeros(self._size),
            "moving_variance": np.ones(self._size),
        }

    def forward(self, inputs: Array, training: bool) -> Array:
        mean, variance = self.statistics.values()
        self._centred = training
        if training:
            batch_moments = inputs.mean(axis=0), inputs.var(axis=0)
            for moving, moment in zip((mean, variance), batch_moments, strict=True):
                moving[...] = moving * self._momentum + moment * (1 - self._momentum)
            mean, variance = batch_moments
        self._deviation = np.sqrt(variance + _EPSILON)
        self._result = (inputs - mean) / self._deviation
        return self._result

    def backward(self, slope: Array) -> Array:
        if not self._centred:
            return np.asarray(slope / self._deviation)
        along = self._result * (slope * self._result).mean(axis=0)
        return np.asarray((slope - slope.mean(axis=0) - along) / self._deviation)


class Dropout(Layer):
    """Inverted dropout: zeroes a random fraction `rate` of the inputs in training, scales the rest.

    Attributes:
        key: Key of the Philox generator; differs between replicas.
        draws: Number of draws, int64 scalar; equal on every replica, part of the state.
    """

    trait = Trait.RANDOM

    def __init__(self, rate: float, *, name: str = "dropout") -> None:
        super().__init__(name)
        self._rate = rate
        self.key = (0, 0)
        self.draws = np.zeros((), np.int64)

    def forward(self, inputs: Array, training: bool) -> Array:
        self._factor = np.ones((), inputs.dtype)
        if training:
            bits = np.random.Philox(key=self.key, counter=[0, 0, 0, int(self.draws)])
            draws = np.random.Generator(bits).random(inputs.shape)
            mask = np.asarray(draws >= self._rate)
            self._factor = mask.astype(inputs.dtype) / (1 - self._rate)
            self.skip_draws()
        return inputs * self._factor

    def skip_draws(self) -> None:
        """Advances the random numbers without drawing."""
        self.draws[...] += 1

    def backward(self, slope: Array) -> Array:
        return slope * self._factor


def _uniform(draw: random.Random, shape: tuple[int, ...], limit: float) -> Array:
    """Uniform float64 numbers in [-limit, limit), as Keras' initializers give them with isotrain's seeds."""
    seed = draw.randint(1, _SEEDS)
    generator = np.random.Generator(np.random.PCG64(seed))
    return np.asarray(-limit + 2 * limit * generator.random(shape))
