"""What a model's layers do that bears on whether runs agree, in words of no framework."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trait(StrEnum):
    """One thing that a layer does in training."""

    LOCAL_STATISTICS = "local-statistics"
    """Normalises with the mean and variance of the samples it is called with."""
    GLOBAL_STATISTICS = "global-statistics"
    """Asks to normalise with those of the global batch."""
    RANDOM = "random"
    """Draws random numbers from the framework's generator."""
    LOWER_PRECISION = "lower-precision"
    """Computes in fewer bits than the spec's precision."""
    CUSTOM_TRAINING = "custom-training"
    """Brings a step, loss or optimizer of its own for training, which is not called."""
    WITHOUT_GRADIENT = "without-gradient"
    """Is a trainable weight that the last step gave no gradient."""
    HIDDEN = "hidden"
    """May do any of these: nobody can look inside."""


@dataclass(frozen=True)
class LayerTrait:
    """A trait of one layer.

    Attributes:
        trait: What it does.
        layer: Its name in the model; of `CUSTOM_TRAINING` what is not called, of `WITHOUT_GRADIENT` the
            weight.
        kind: Its class.
    """

    trait: Trait
    layer: str
    kind: str
