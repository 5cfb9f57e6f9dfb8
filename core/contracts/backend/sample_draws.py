"""Random numbers of layers and objectives by sample: functions for users, and what a backend implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextvars import ContextVar
from typing import Any

from isotrain.core.errors import SpecError

Tensor = Any


class SampleDraws(ABC):
    """Random numbers of one replica in a pass over one slice, by sample.

    A number depends on the seed, the step, the index of the sample in the global batch, the number of the
    draw in the pass, and the index of the number in the draw. So any split of the global batch has the same.

    Attributes:
        is_training: Whether the pass is one of training, not of an evaluation.
    """

    is_training: bool

    @abstractmethod
    def uniform_like(self, x: Tensor) -> Tensor:
        """Uniform numbers between 0 and 1, exclusive, of the shape `[batch, ...]` and dtype of a tensor."""

    @abstractmethod
    def normal_like(self, x: Tensor) -> Tensor:
        """Standard normal numbers of the shape `[batch, ...]` and dtype of a tensor."""

    @abstractmethod
    def bernoulli_like(self, x: Tensor, p: float) -> Tensor:
        """Ones with probability `p` and zeros, of the shape `[batch, ...]` and dtype of a tensor."""


active_draws: ContextVar[SampleDraws | None] = ContextVar("isotrain_sample_draws", default=None)
"""Draws of the pass that this thread computes; None outside of one."""
_spec = {"random_layers": "per-sample"}


def draw_by(random_layers: str) -> None:
    """Sets the spec's `random_layers` of the run in this process."""
    _spec["random_layers"] = random_layers


def _draws() -> SampleDraws | None:
    """Draws of the pass that this thread computes; None outside of one.

    Raises:
        SpecError: The run draws per replica, so that no pass has such draws.
    """
    if _spec["random_layers"] != "per-sample":
        raise SpecError("isotrain.random: expected random_layers: per-sample in the spec.")
    return active_draws.get()


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform random numbers by sample, in the shape and dtype of a tensor. Local.

    Args:
        x: Tensor of torch or TensorFlow, shape `[batch, ...]`, floating point; only its form matters.
        low: Lower bound.
        high: Upper bound.

    Returns:
        Numbers in (low, high); outside of a pass of the run, as in predictions, their mean.
    """
    draws = _draws()
    unit = x * 0 + 0.5 if draws is None else draws.uniform_like(x)
    return low + (high - low) * unit


def normal(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal random numbers by sample, in the shape and dtype of a tensor. Local.

    Args:
        x: Tensor of torch or TensorFlow, shape `[batch, ...]`, floating point; only its form matters.
        mean: Mean of the distribution.
        std: Standard deviation.

    Returns:
        Numbers of that distribution; outside of a pass of the run, as in predictions, their mean.
    """
    draws = _draws()
    standard = x * 0 if draws is None else draws.normal_like(x)
    return mean + std * standard


def bernoulli(x: Tensor, p: float = 0.5) -> Tensor:
    """Random zeros and ones by sample, in the shape and dtype of a tensor. Local.

    Args:
        x: Tensor of torch or TensorFlow, shape `[batch, ...]`, floating point; only its form matters.
        p: Probability of a one.

    Returns:
        Zeros and ones; outside of a pass of the run, as in predictions, their mean.
    """
    draws = _draws()
    return x * 0 + p if draws is None else draws.bernoulli_like(x, p)


def dropout(x: Tensor, rate: float) -> Tensor:
    """Inverted dropout by sample: zeros a fraction `rate` of the entries, scales the others. Local.

    Args:
        x: Tensor of torch or TensorFlow, shape `[batch, ...]` and a floating-point dtype.
        rate: Probability of a zero, below 1.

    Returns:
        Tensor of the shape and dtype of `x`; outside of training `x` itself.
    """
    draws = _draws()
    if draws is None or not draws.is_training:
        return x
    return x * draws.bernoulli_like(x, 1 - rate) * (1 / (1 - rate))
