"""What weights, gradients and optimizer slots take in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateBytes:
    """Of one replica, in bytes.

    Attributes:
        weights: Trainable and others.
        gradients: Of a step, where they take most.
        slots: Of the optimizer.
    """

    weights: int
    gradients: int
    slots: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.slots


@dataclass(frozen=True)
class ModelBytes:
    """Of all that a model and its training have, in bytes.

    Attributes:
        weights: Of each trainable weight, in order.
        fixed: Of the other weights together.
        slots: How many slots of a weight's size the optimizer has for each.
    """

    weights: tuple[int, ...]
    fixed: int = 0
    slots: int = 0

    @property
    def replicated(self) -> StateBytes:
        """What a replica has that has all of it."""
        trained = sum(self.weights)
        return StateBytes(trained + self.fixed, trained, trained * self.slots)
