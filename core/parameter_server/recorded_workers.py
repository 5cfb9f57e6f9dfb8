"""Worker pool of a process that stands for all: it records what workers would get, and sends nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from isotrain.core.contracts.backend.adapter_protocols import Message
from isotrain.core.contracts.process import ServerConnection, rank_of
from isotrain.core.parameter_server.tcp_workers import arrays_for
from isotrain.core.parameter_server.work_queue import WorkItem
from isotrain.core.parameter_server.worker_pool import LostWorker, WorkerPool, WorkResult

_messages: list[Message] = []


@contextlib.contextmanager
def recorded_messages() -> Iterator[Sequence[Message]]:
    """Context that gives what rank 0 would have sent to workers since it was entered. Local."""
    _messages.clear()
    yield _messages


class RecordedWorkerPool(WorkerPool):
    """Worker pool whose workers answer at once, with gradients of zeros.

    Workers get slices, and the weights unless there are servers: these get gradients, an equal part each.
    """

    def __init__(self, server_connection: ServerConnection) -> None:
        """Has a worker for each replica; none is started."""
        processes = server_connection.context.processes
        self._servers = [each.rank for each in processes if each.role == "server"]
        self.lost: list[LostWorker] = []
        self._weights: Callable[[], np.ndarray] | None = None
        replicas = server_connection.context.replicas
        self._versions = dict.fromkeys(range(replicas), -1)
        self._results: list[WorkResult] = []

    def await_workers(self, weights: Callable[[], np.ndarray]) -> None:
        """Takes the function that returns weights and moving statistics as one vector, 1-D."""
        self._weights = weights

    def free(self) -> Collection[int]:
        return self._versions.keys() - {result.worker for result in self._results}

    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        assert self._weights is not None, "await_workers comes first"
        weights = self._weights()
        _, arrays = arrays_for(item)
        if not self._servers and self._versions[worker] != version:
            self._versions[worker] = version
            arrays.append(weights)
        nbytes = sum(array.nbytes for array in arrays)
        _messages.append(Message("send", nbytes, (0, rank_of(worker))))
        update, no_metrics = np.zeros_like(weights), np.zeros(0)
        self._results.append(WorkResult(item, worker, version, 0.0, update, no_metrics))

    def updated(self, version: int) -> None:
        """Records that each server gets the gradients and moving statistics for its weights."""
        assert self._weights is not None, "await_workers comes first"
        sent = self._weights().nbytes
        for index, rank in enumerate(self._servers):
            count = len(self._servers)
            part = (index + 1) * sent // count - index * sent // count
            _messages.append(Message("send", part, (0, rank)))

    def collect(self, timeout: float) -> list[WorkResult]:
        results, self._results = self._results, []
        return results

    def lost_items(self) -> list[WorkItem]:
        return []

    def close(self) -> None:
        """Does nothing."""
