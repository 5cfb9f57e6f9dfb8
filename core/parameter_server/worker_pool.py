"""Contract of the worker pool (the workers that compute gradients for a coordinator), and worker liveness."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from isotrain.core.contracts.events import WorkerLost
from isotrain.core.contracts.process import ServerConnection, rank_of, worker_of
from isotrain.core.errors import PeerLostError
from isotrain.core.parameter_server.work_queue import WorkItem
from isotrain.core.system.process import poll_readable
from isotrain.core.transport.connection import Connection
from isotrain.core.transport.server import AuthenticatedServer

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class WorkResult:
    """Result of a work item.

    Attributes:
        item: Work item.
        worker: Number of the worker; None: the backend does not tell.
        version: Version of the weights it was computed with (number of updates).
        loss: Sum over its micro-batches of weight * mean loss.
        update: Flattened gradients, then the changes of the moving statistics: one vector, 1-D.
        metrics: State of the training metrics over it (sums), 1-D; empty without metrics.
    """

    item: WorkItem
    worker: int | None
    version: int
    loss: float
    update: np.ndarray
    metrics: np.ndarray


@dataclass(frozen=True)
class LostWorker:
    """A worker that was lost.

    Attributes:
        worker: Number of the worker, that of a replica.
        rank: Rank of its process.
        step: Step of its work item; None: it had none, or the backend does not tell.
        reason: Reason why it counts as lost.
    """

    worker: int
    rank: int
    step: int | None
    reason: str


class WorkerPool(ABC):
    """Workers of a parameter-server run, for use by the coordinator only.

    Attributes:
        lost: Workers lost so far.
    """

    lost: list[LostWorker]

    @abstractmethod
    def free(self) -> Collection[int]:
        """Numbers of the workers without a work item."""

    @abstractmethod
    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        """Starts a work item on a free worker, with the weights of this version."""

    @abstractmethod
    def collect(self, timeout: float) -> list[WorkResult]:
        """The results received; waits up to `timeout` seconds for the first.

        Raises:
            PeerLostError: No worker is left, or one failed to compute.
        """

    @abstractmethod
    def lost_items(self) -> list[WorkItem]:
        """Work items of workers that were lost since the last call."""

    def updated(self, version: int) -> None:  # noqa: B027  # most pools send weights with the items
        """Called when the weights get a new version."""

    def execution_state(self, worker: int) -> Mapping[str, np.ndarray]:
        """Execution state (kind `execution`) of a free worker by name, any shapes; empty if it is lost."""
        return {}

    def set_execution_state(  # noqa: B027  # workers without execution state
        self, worker: int, execution_state: Mapping[str, np.ndarray]
    ) -> None:
        """Restores the execution state of a free worker: arrays by name, in the shapes and dtypes as read."""

    @abstractmethod
    def close(self) -> None:
        """Ends all workers."""


def report_lost_worker(
    server_connection: ServerConnection, worker: int, step: int | None, reason: str
) -> LostWorker:
    """Reports a lost worker to the launcher."""
    loss = LostWorker(worker, rank_of(worker), step, reason)
    server_connection.reporter.emit(WorkerLost(lost_rank=loss.rank, lost_step=step, reason=reason))
    return loss


def no_workers_left(lost: Iterable[LostWorker]) -> PeerLostError:
    """Error of a run without workers, with the reason for each."""
    reasons = "; ".join(f"rank {loss.rank}: {loss.reason}" for loss in lost)
    return PeerLostError(f"no worker is left to compute gradients. Lost peers: {reasons}.")


class WorkerLiveness:
    """Detects lost workers where the framework's own runtime distributes the work.

    Keeps an idle connection to each process, which closes when the process dies.

    Attributes:
        present: Numbers of the workers that are alive.
        lost: Lost workers.
    """

    def __init__(self, server_connection: ServerConnection) -> None:
        self.present: set[int] = set()
        self.lost: list[LostWorker] = []
        self._server_connection = server_connection
        self._server = AuthenticatedServer(server_connection.server_address, server_connection.key)
        self._connections: dict[int, Connection] = {}

    def await_all(self) -> None:
        """Returns once all other processes are connected.

        Raises:
            PeerLostError: A process did not connect in time.
        """
        self._server_connection.reporter.enter("await workers")
        deadline = time.monotonic() + self._server_connection.start_timeout
        expected = set(range(1, self._server_connection.context.world_size))
        while missing := expected - self._connections.keys():
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, sorted(missing)))
                raise PeerLostError(
                    f"not connected within {self._server_connection.start_timeout:g} s:"
                    f" peers of rank {ranks}."
                )
            time.sleep(_POLL_SECONDS)
            self._connections.update(self._server.arrivals())
        self.present = set(range(self._server_connection.context.replicas))

    def poll(self) -> None:
        """Updates `present` and `lost`.

        Raises:
            PeerLostError: No worker is left.
        """
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for descriptor in poll_readable(ranks, 0.0):  # no process ever sends: readable means closed
            rank = ranks[descriptor]
            self._connections.pop(rank).close()
            if (worker := worker_of(rank)) in self.present:
                self.present.remove(worker)
                reason = "its connection was closed"
                self.lost.append(report_lost_worker(self._server_connection, worker, None, reason))
        if not self.present:
            raise no_workers_left(self.lost)

    def close(self) -> None:
        """Closes all connections, on which the other processes end."""
        self._server.close()
        for connection in self._connections.values():
            connection.close()
