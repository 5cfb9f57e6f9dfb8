"""Layers with a gradient written by hand, which begin with the weights that Keras' would have."""

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
"""Each with its derivative, as a function of its result."""
_SEEDS = int(1e9)
_EPSILON = 1e-3


class Layer(ABC):
    """A function of its inputs and weights, and the gradient of it.

    Attributes:
        name: With which the names of its weights begin.
        trait: What it does that bears on whether runs agree.
        weights: What is trained; the network keeps these very arrays, and they are written in place.
        statistics: What forward passes move in training, likewise.
        gradients: Of the weights, from the last `backward`.
        frozen: Whether its statistics are frozen: it then works in training as in evaluation.
    """

    trait: ClassVar[Trait | None] = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights: dict[str, Array] = {}
        self.statistics: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self.frozen = False

    def start(self, draw: random.Random) -> None:  # noqa: B027  # a layer may have no weights
        """Makes weights and statistics, in float64.

        Args:
            draw: Gives the seed of each weight that begins with random numbers.
        """

    @abstractmethod
    def forward(self, inputs: Array, training: bool) -> Array:
        """The layer's result for samples, shape `[samples, ...]`; keeps what `backward` needs."""

    @abstractmethod
    def backward(self, slope: Array) -> Array:
        """Notes the gradients of the weights, and gives that of the inputs.

        Args:
            slope: The derivative of the loss by the result of the last `forward`.
        """


class Dense(Layer):
    """Inputs times a kernel, a bias, an activation."""

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
    """A vector for each whole number below `rows`."""

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
    """Samples less their mean, over their standard deviation; moving ones in evaluation."""

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
            found = inputs.mean(axis=0), inputs.var(axis=0)
            for moving, own in zip((mean, variance), found, strict=True):
                moving[...] = moving * self._momentum + own * (1 - self._momentum)
            mean, variance = found
        self._deviation = np.sqrt(variance + _EPSILON)
        self._result = (inputs - mean) / self._deviation
        return self._result

    def backward(self, slope: Array) -> Array:
        if not self._centred:
            return np.asarray(slope / self._deviation)
        along = self._result * (slope * self._result).mean(axis=0)
        return np.asarray((slope - slope.mean(axis=0) - along) / self._deviation)


class Dropout(Layer):
    """Sets a random part of the inputs to 0 in training, and makes up for it with the others.

    Attributes:
        key: Of its random numbers; another on each replica.
        draws: How often it has drawn: the same on every replica, part of the state.
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
            kept = np.asarray(draws >= self._rate)
            self._factor = kept.astype(inputs.dtype) / (1 - self._rate)
            self.skip_draws()
        return inputs * self._factor

    def skip_draws(self) -> None:
        """Goes on to other numbers, without drawing."""
        self.draws[...] += 1

    def backward(self, slope: Array) -> Array:
        return slope * self._factor


def _uniform(draw: random.Random, shape: tuple[int, ...], limit: float) -> Array:
    """Numbers between -limit and limit, as Keras' initializers have them under isotrain's adapters."""
    seed = draw.randint(1, _SEEDS)
    generator = np.random.Generator(np.random.PCG64(seed))
    return np.asarray(-limit + 2 * limit * generator.random(shape))
