"""Optimizers, with Keras' formulas."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.plugin import TrainingSpec, UnsupportedError, WeightGroup, unknown_name, weight_groups
from isotrain.testing.reference.layers import Array


class Optimizer(ABC):
    """Optimizer that updates weights in place.

    Attributes:
        state: Optimizer state by name: `steps`, int64 scalar, and arrays like the weights; updated in place.
        group_rates: Rates by the schedules of optimizer groups, by index of the group.
    """

    def __init__(
        self, weights: Mapping[str, Array], settings: Any, groups: Sequence[WeightGroup]
    ) -> None:
        """Initializes the optimizer state of weights by name, which the groups divide up."""
        self._weights = weights
        self._settings = {
            index: settings.model_copy(update=group.options)
            for group in groups
            for index in group.indices
        }
        self._groups = {index: group for group in groups for index in group.indices}
        self.group_rates: Mapping[int, float] = {}
        self._steps = np.zeros((), np.int64)
        self.state: dict[str, Array] = {"steps": self._steps}

    def _slots(self, kind: str) -> list[Array]:
        """Adds an array of zeros in each weight's shape to the state; returns them in order."""
        slots = {f"{kind}/{name}": np.zeros_like(w) for name, w in self._weights.items()}
        self.state |= slots
        return list(slots.values())

    def update(self, gradients: Sequence[Array], rate: float) -> None:
        """Takes one step with gradients in the shapes of the weights and a learning rate."""
        self._steps[...] += 1
        for index, (weight, gradient) in enumerate(
            zip(self._weights.values(), gradients, strict=True)
        ):
            group = self._groups[index]
            base = rate if group.schedule is None else self.group_rates[group.schedule]
            weight_rate = base * group.lr_factor
            if decay := self._settings[index].weight_decay:
                weight -= weight_rate * decay * weight
            weight += self._change(index, gradient, weight_rate)

    @abstractmethod
    def _change(self, place: int, gradient: Array, rate: float) -> Array:
        """Update to add to the weight at index `place`, in its shape; updates its optimizer state."""


class Sgd(Optimizer):
    """SGD on weights of any shape, optionally with momentum or Nesterov momentum."""

    def __init__(
        self, weights: Mapping[str, Array], settings: Any, groups: Sequence[WeightGroup]
    ) -> None:
        super().__init__(weights, settings, groups)
        self._momenta = self._slots("momentum") if settings.slots else []

    def _change(self, place: int, gradient: Array, rate: float) -> Array:
        step = -rate * gradient
        if not self._momenta:
            return step
        settings, momentum = self._settings[place], self._momenta[place]
        momentum[...] = settings.momentum * momentum + step
        return settings.momentum * momentum + step if settings.nesterov else momentum


class Adam(Optimizer):
    """Adam (Kingma & Ba 2015) on weights of any shape; with weight decay, AdamW."""

    def __init__(
        self, weights: Mapping[str, Array], settings: Any, groups: Sequence[WeightGroup]
    ) -> None:
        super().__init__(weights, settings, groups)
        self._means, self._squares = self._slots("mean"), self._slots("square")

    def _change(self, place: int, gradient: Array, rate: float) -> Array:
        settings, mean, square = self._settings[place], self._means[place], self._squares[place]
        mean += (gradient - mean) * (1 - settings.beta_1)
        square += (gradient * gradient - square) * (1 - settings.beta_2)
        steps = int(self._steps)
        factor = rate * math.sqrt(1 - settings.beta_2**steps) / (1 - settings.beta_1**steps)
        return np.asarray(-factor * mean / (np.sqrt(square) + settings.epsilon))


OPTIMIZERS: Mapping[str, type[Optimizer]] = {"sgd": Sgd, "adam": Adam, "adamw": Adam}


def require_known(spec: TrainingSpec) -> None:
    """Checks that this backend has the spec's optimizer.

    Raises:
        UnsupportedError: It does not.
    """
    name = spec.optimizer.name
    if name not in OPTIMIZERS:
        raise UnsupportedError(f"the NumPy backend: {unknown_name('optimizer', name, OPTIMIZERS)}")
    if "velocity_hat" in spec.optimizer.slots:
        raise UnsupportedError("the NumPy backend has no AMSGrad: leave amsgrad out.")


def build_optimizer(
    spec: TrainingSpec, trainable: Mapping[str, Array], indices: Sequence[int] | None = None
) -> Optimizer:
    """Optimizer of the spec for the trainable weights, of any shapes, or for those at the indices."""
    names = list(trainable)
    updated = names if indices is None else [names[index] for index in indices]
    groups = weight_groups(spec.optimizer, names, updated)
    weights = {name: trainable[name] for name in updated}
    return OPTIMIZERS[spec.optimizer.name](weights, spec.optimizer, groups)


def clipped(
    spec: TrainingSpec, gradients: Sequence[Array], norm_of_all: float | None = None
) -> Sequence[Array]:
    """Clips gradients by value, by norm or by global norm, as the spec says.

    Args:
        spec: Spec with the clip settings.
        gradients: Gradients of all weights, or of a shard of them, any shapes.
        norm_of_all: Global norm over all weights, a scalar; by default that of `gradients`.
    """
    if spec.clip is None:
        return gradients
    value, norm, of_all = spec.clip.value, spec.clip.norm, spec.clip.global_norm
    if value is not None:
        return [np.clip(gradient, -value, value) for gradient in gradients]
    norms = [float(np.linalg.norm(gradient)) for gradient in gradients]
    if norm is not None:
        return [g * (norm / max(size, norm)) for g, size in zip(gradients, norms, strict=True)]
    assert of_all is not None
    global_norm = math.hypot(*norms) if norm_of_all is None else norm_of_all
    return [gradient * (of_all / max(global_norm, of_all)) for gradient in gradients]
