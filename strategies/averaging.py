"""Base class and computations of strategies whose replicas take local steps between averagings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from isotrain.plugin import (
    AVERAGED,
    Batch,
    Plan,
    Replica,
    ReplicaGroup,
    StatePart,
    Strategy,
    Tensor,
    TrainingSpec,
    average_state,
    slice_weights,
)
from isotrain.strategies import option_checks


@dataclass
class SliceWeightSums:
    """Slice weights of the local replicas, summed over the local steps since an exchange.

    Attributes:
        sums: Sum of each local replica; empty before the first step.
        steps: Number of steps.
        even: Whether all replicas had equally many samples in each of them.
    """

    sums: list[float] = field(default_factory=list)
    steps: int = 0
    even: bool = True

    def add(self, batch: Batch) -> None:
        """Adds the slices of a step. Local."""
        weights = slice_weights(batch)
        sums = self.sums or [0.0] * len(weights)
        self.sums = [a + b for a, b in zip(sums, weights, strict=True)]
        self.steps += 1
        self.even = self.even and batch.even

    def means(self, group: ReplicaGroup) -> list[list[Tensor]]:
        """Weights of the local replicas in means, one value of `compute`; none where all are equal. Local."""
        if self.even:
            return []
        return [[group.tensor(np.array(sum_ / self.steps)) for sum_ in self.sums]]


class LocalStepStrategy(Strategy):
    """Replicas take local steps; evaluation and the end of the run see the mean of their weights."""

    _total_steps: int | None = None

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses float16, and notes that clipping is local."""
        option_checks.refuse_float16(
            self.name, spec, "takes local steps without a common loss scale"
        )
        if spec.clip is None or plan.replicas == 1:
            return []
        return [f"{self.name}: in local steps each replica clips its local gradients (`clip`)"]

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Keeps the number of steps."""
        self._total_steps = plan.total_steps

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Evaluates with the synchronised weights, then restores each replica's local weights."""
        local = group.compute(read_weights)
        try:
            self.sync_weights(group)
            yield
        finally:
            group.compute(write_weights, local)

    def finished(self, group: ReplicaGroup) -> None:
        """Synchronises the weights of all replicas."""
        self.sync_weights(group)

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """None: the weights, of which all get the mean, are not the strategy's own state."""
        return []

    def exchanges_per_step(self, default: float, count: Callable[[int], int]) -> float:
        """Weight exchanges per step, including the one at the end of the run.

        Args:
            default: The value where the number of steps is not known.
            count: Function from the number of steps to the exchanges in them.
        """
        steps = self._total_steps
        return default if not steps else (count(steps) + 1) / steps

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Gives all replicas the weights to evaluate and to keep: here their mean. Collective."""
        group.compute(average_weights)


def read_weights(replica: Replica) -> Tensor:
    """A copy of weights and moving statistics, one vector. Local."""
    return replica.read(AVERAGED)


def write_weights(replica: Replica, vector: Tensor) -> None:
    """Sets weights and moving statistics from a vector as of `read_weights`. Local."""
    replica.write(AVERAGED, vector)


def read_trainable(replica: Replica) -> Tensor:
    """A copy of the trainable weights, one vector. Local."""
    return replica.read(("trainable",))


def as_trainable(replica: Replica, vector: Tensor) -> Tensor:
    """A vector in the dtype in which trainable weights are read. Local."""
    return replica.ops.cast(vector, replica.read_range(0, 0).dtype)


def average_weights(replica: Replica) -> None:
    """Replaces weights and moving statistics by their mean over all replicas. Collective."""
    average_state(replica, AVERAGED)


def average_parts(
    replica: Replica, weight: Tensor | None = None, *, static: Sequence[StatePart]
) -> None:
    """Averages parts of the state over all replicas. Collective.

    Args:
        replica: The replica that runs this computation.
        weight: Weight of this replica, a scalar, as for `average_state`.
        static: Parts of the state.
    """
    average_state(replica, static, weight)


def average_statistics(replica: Replica, weight: Tensor | None = None) -> None:
    """Averages moving statistics over all replicas, as a synchronous step does. Collective.

    Args:
        replica: The replica that runs this computation.
        weight: Weight of this replica, a scalar, as for `average_state`.
    """
    average_state(replica, ("statistics",), weight)
