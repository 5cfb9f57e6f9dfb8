"""Optimizers, with Keras' formulas."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.plugin import TrainingSpec, UnsupportedError, unknown_name
from isotrain.testing.reference.layers import Array


class Optimizer(ABC):
    """Changes weights by their gradients, in place.

    Attributes:
        state: Its own numbers by name, likewise changed in place.
    """

    def __init__(self, weights: Mapping[str, Array], settings: Any) -> None:
        """Starts before the first step.

        Args:
            weights: What is trained, by name.
            settings: The spec's optimizer.
        """
        self._weights = weights
        self._settings = settings
        self._steps = np.zeros((), np.int64)
        self.state: dict[str, Array] = {"steps": self._steps}

    def _slots(self, kind: str) -> list[Array]:
        """Zeros for each weight, as part of the state."""
        slots = {f"{kind}/{name}": np.zeros_like(own) for name, own in self._weights.items()}
        self.state |= slots
        return list(slots.values())

    def update(self, gradients: Sequence[Array], rate: float) -> None:
        """Takes one step."""
        self._steps[...] += 1
        decay = self._settings.weight_decay
        for place, (weight, gradient) in enumerate(
            zip(self._weights.values(), gradients, strict=True)
        ):
            if decay:
                weight -= rate * decay * weight
            weight += self._change(place, gradient, rate)

    @abstractmethod
    def _change(self, place: int, gradient: Array, rate: float) -> Array:
        """What is added to a weight; moves its slots."""


class Sgd(Optimizer):
    """Gradient descent, with or without momentum."""

    def __init__(self, weights: Mapping[str, Array], settings: Any) -> None:
        super().__init__(weights, settings)
        self._momenta = self._slots("momentum") if settings.momentum else []

    def _change(self, place: int, gradient: Array, rate: float) -> Array:
        step = -rate * gradient
        if not self._momenta:
            return step
        factor, momentum = self._settings.momentum, self._momenta[place]
        momentum[...] = factor * momentum + step
        return factor * momentum + step if self._settings.nesterov else momentum


class Adam(Optimizer):
    """Adam, and with its decay AdamW."""

    def __init__(self, weights: Mapping[str, Array], settings: Any) -> None:
        super().__init__(weights, settings)
        self._means, self._squares = self._slots("mean"), self._slots("square")

    def _change(self, place: int, gradient: Array, rate: float) -> Array:
        given, mean, square = self._settings, self._means[place], self._squares[place]
        mean += (gradient - mean) * (1 - given.beta_1)
        square += (gradient * gradient - square) * (1 - given.beta_2)
        steps = int(self._steps)
        factor = rate * math.sqrt(1 - given.beta_2**steps) / (1 - given.beta_1**steps)
        return np.asarray(-factor * mean / (np.sqrt(square) + given.epsilon))


OPTIMIZERS: Mapping[str, type[Optimizer]] = {"sgd": Sgd, "adam": Adam, "adamw": Adam}


def require_known(spec: TrainingSpec) -> None:
    """Makes sure that the spec's optimizer is here.

    Raises:
        UnsupportedError: It is not.
    """
    name, amsgrad = spec.optimizer.name, getattr(spec.optimizer, "amsgrad", False)
    if name not in OPTIMIZERS:
        raise UnsupportedError(
            f"backend 'reference': {unknown_name('optimizer', name, OPTIMIZERS)}"
        )
    if amsgrad:
        raise UnsupportedError("backend 'reference' has no AMSGrad: leave amsgrad out.")


def build_optimizer(spec: TrainingSpec, weights: Mapping[str, Array]) -> Optimizer:
    """Makes the spec's optimizer."""
    return OPTIMIZERS[spec.optimizer.name](weights, spec.optimizer)


def clipped(
    spec: TrainingSpec, gradients: Sequence[Array], norm_of_all: float | None = None
) -> Sequence[Array]:
    """Gradients within the spec's bounds.

    Args:
        spec: Has them.
        gradients: Of all weights, or of some.
        norm_of_all: The norm of those of all weights, where these are of some.
    """
    if spec.clip is None:
        return gradients
    value, norm, of_all = spec.clip.value, spec.clip.norm, spec.clip.global_norm
    if value is not None:
        return [np.clip(gradient, -value, value) for gradient in gradients]
    norms = [float(np.linalg.norm(gradient)) for gradient in gradients]
    if norm is not None:
        return [g * (norm / max(own, norm)) for g, own in zip(gradients, norms, strict=True)]
    assert of_all is not None
    found = math.hypot(*norms) if norm_of_all is None else norm_of_all
    return [gradient * (of_all / max(found, of_all)) for gradient in gradients]
