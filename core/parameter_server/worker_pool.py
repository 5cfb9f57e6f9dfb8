"""Those who compute gradients for a coordinator: the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from isotrain.core.contracts.events import WorkerLost
from isotrain.core.contracts.process import ServerConnection, rank_of
from isotrain.core.errors import PeerLostError
from isotrain.core.parameter_server.work_queue import WorkItem


@dataclass(frozen=True)
class WorkResult:
    """What was computed of an item.

    Attributes:
        item: Which.
        worker: By whom; None where the backend does not tell.
        version: Updates that were in the weights it was computed with.
        loss: The sum over its slices of weight * mean.
        change: Its gradients in one vector, and behind them by how much the moving statistics changed.
        metrics: The sums of the training metrics over it.
    """

    item: WorkItem
    worker: int | None
    version: int
    loss: float
    change: np.ndarray
    metrics: np.ndarray


@dataclass(frozen=True)
class LostWorker:
    """A worker that was lost.

    Attributes:
        worker: Its number, that of a replica.
        rank: Of its process.
        step: Of the slice that it had; None where it had none, or the backend does not tell.
        reason: What was noticed.
    """

    worker: int
    rank: int
    step: int | None
    reason: str


class WorkerPool(ABC):
    """The workers, seen from the coordinator.

    Attributes:
        lost: The workers that were lost so far.
    """

    lost: list[LostWorker]

    @abstractmethod
    def free(self) -> Collection[int]:
        """The workers that can be handed an item."""

    @abstractmethod
    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        """Lets a free worker compute an item with the weights of this version."""

    @abstractmethod
    def collect(self, patience: float) -> list[WorkResult]:
        """What has come in; waits for something up to `patience` seconds.

        Raises:
            PeerLostError: No worker is left, or one failed to compute.
        """

    @abstractmethod
    def lost_items(self) -> list[WorkItem]:
        """The items of workers that were lost since the last call."""

    def updated(self, version: int) -> None:  # noqa: B027  # most are told when they get work
        """The weights are of another version from now on."""

    def execution_state(self, worker: int) -> Mapping[str, np.ndarray]:
        """How a worker that has nothing to do has come to compute: its state of the kind `exchange`.

        Nothing of one that is lost.
        """
        return {}

    def set_execution_state(  # noqa: B027  # as they have none
        self, worker: int, execution_state: Mapping[str, np.ndarray]
    ) -> None:
        """Lets a worker that has nothing to do compute from here on as one that has come so far."""

    @abstractmethod
    def close(self) -> None:
        """Lets every worker end."""


def report_lost_worker(
    server_connection: ServerConnection, worker: int, step: int | None, reason: str
) -> LostWorker:
    """Tells the launcher of a lost worker."""
    loss = LostWorker(worker, rank_of(worker), step, reason)
    server_connection.reporter.emit(WorkerLost(lost_rank=loss.rank, lost_step=step, reason=reason))
    return loss


def no_workers_left(lost: Iterable[LostWorker]) -> PeerLostError:
    """The error of a run without workers; says what became of each peer."""
    told = "; ".join(f"rank {loss.rank}: {loss.reason}" for loss in lost)
    return PeerLostError(f"no worker is left to compute gradients. Lost peers: {told}.")
