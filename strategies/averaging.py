"""What strategies have in common whose replicas drift apart between exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from isotrain.plugin import (
    Batch,
    Plan,
    Replica,
    ReplicaGroup,
    StatePart,
    Strategy,
    Tensor,
    TrainingSpec,
)
from isotrain.strategies import option_checks

WEIGHTS: tuple[StatePart, ...] = ("trainable", "statistics")


class LocalStepStrategy(Strategy):
    """Replicas take local steps; evaluation and the end of the run see the mean of their weights."""

    _total_steps: int | None = None

    def configure(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses loss scaling, and says what clipping means."""
        option_checks.without_loss_scaling(
            self.name, spec, "takes local steps without a common loss scale"
        )
        self._total_steps = plan.total_steps
        if spec.clip is None or plan.replicas == 1:
            return []
        return [f"{self.name}: clip is applied to each replica's own gradients in local steps"]

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Evaluates the mean of the replicas' weights, then gives each its own back."""
        own = group.compute(read_weights)
        self.sync_weights(group)
        try:
            yield
        finally:
            group.compute(write_weights, own)

    def finished(self, group: ReplicaGroup) -> None:
        """Leaves every replica with the same weights."""
        self.sync_weights(group)

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Says that other replicas cannot have the weights of each one before."""
        if strategy_before == self.name and replicas_before != replicas:
            return [f"{self.name}: each replica's own weights: all go on from their mean"]
        return []

    def exchanges_per_step(self, usual: float, counted: Callable[[int], int]) -> float:
        """Exchanges per step, the one at the end included; `usual` where the steps are not known."""
        steps = self._total_steps
        return usual if not steps else (counted(steps) + 1) / steps

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Gives every replica the weights that the run stands for: here their mean."""
        group.compute(average_weights)


def read_weights(replica: Replica) -> Tensor:
    """A copy of the replica's weights and moving statistics."""
    return replica.read(WEIGHTS)


def write_weights(replica: Replica, vector: Tensor) -> None:
    """Puts weights and moving statistics back."""
    replica.write(WEIGHTS, vector)


def average_weights(replica: Replica) -> None:
    """Replaces weights and moving statistics by their mean over the replicas."""
    average(replica, WEIGHTS)


def average(replica: Replica, parts: Sequence[StatePart], weight: Tensor | None = None) -> None:
    """Replaces state by its mean over all replicas.

    Args:
        replica: Any; all call it.
        parts: Of the state.
        weight: Of this replica, a scalar; the mean of all weights is 1. None for 1.
    """
    vector = replica.read(parts)
    if vector.shape[0] == 0:
        return
    if weight is not None:
        vector = vector * replica.ops.cast(weight, vector.dtype)
    replica.write(parts, replica.all_reduce(vector, "mean"))


def average_statistics(replica: Replica, weight: Tensor | None) -> None:
    """Makes the replicas agree on their moving statistics, as a synchronised step does."""
    average(replica, ("statistics",), weight)


def shares(batch: Batch) -> list[float]:
    """Per local replica its share of the global batch, where 1 is an equal one."""
    return [sum(piece.weight for piece in pieces) for pieces in batch.slices]


def weights_of_replicas(group: ReplicaGroup, batch: Batch) -> list[list[Tensor]]:
    """The shares as tensors, for `compute`: one list, or none where all shares are equal."""
    if batch.even:
        return []
    return [[group.tensor(np.array(share)) for share in shares(batch)]]
