"""The contract of a strategy: how replicas cooperate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.core.capabilities import Capability

if TYPE_CHECKING:
    from isotrain.core.data import Batch
    from isotrain.core.group import ReplicaGroup, Tensor


class Strategy(ABC):
    """What is computed locally and what is exchanged when; neutral to frameworks.

    One instance lives in each process. Its options are the keyword arguments of its constructor.

    Attributes:
        name: The name it is registered under.
        summary: One line for listings.
        requires: What it asks of a backend; a backend that lacks one of these is refused by the plan.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    requires: ClassVar[frozenset[Capability]]

    def started(self, group: ReplicaGroup) -> None:  # noqa: B027  # doing nothing is a fine choice
        """Called once on every process before the first step."""

    @abstractmethod
    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Trains on one global batch, on every process; returns its mean loss (a scalar tensor)."""

    def finished(self, group: ReplicaGroup) -> None:  # noqa: B027  # as above
        """Called once on every process after the last step, before the final weights are read."""

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """Bytes that each replica sends per step on average; None leaves it to the backend."""
        return None


StrategyFactory = Any
"""A `Strategy` subclass, or a callable with the same keyword arguments that returns one."""
