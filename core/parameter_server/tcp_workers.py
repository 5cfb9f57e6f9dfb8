"""Worker pool over TCP: the coordinator sends weights and slices, the workers send gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.contracts.process import ServerConnection, rank_of, worker_of
from isotrain.core.data.pytree import encode_tree
from isotrain.core.errors import PeerLostError
from isotrain.core.parameter_server.work_queue import WorkItem
from isotrain.core.parameter_server.worker_pool import (
    LostWorker,
    WorkerPool,
    WorkResult,
    no_workers_left,
    report_lost_worker,
)
from isotrain.core.system.process import poll_readable
from isotrain.core.transport.connection import Connection, ConnectionLostError
from isotrain.core.transport.server import AuthenticatedServer

_POLL_SECONDS = 0.1


@dataclass
class _Worker:
    number: int
    connection: Connection
    ready: bool = False
    item: WorkItem | None = None
    since: float = 0.0
    version: int = -1


class TcpWorkerPool(WorkerPool):
    """Worker pool with one connection to each worker; a worker's number is its replica's."""

    def __init__(self, server_connection: ServerConnection) -> None:
        """Listens; `await_workers` accepts the workers."""
        self.lost: list[LostWorker] = []
        self._server_connection = server_connection
        self._weights: Callable[[], np.ndarray] | None = None
        self._server = AuthenticatedServer(server_connection.server_address, server_connection.key)
        self._workers: dict[int, _Worker] = {}
        self._lost_items: list[WorkItem] = []

    def await_workers(self, weights: Callable[[], np.ndarray]) -> None:
        """Returns once all workers are ready.

        Args:
            weights: Returns the current weights and moving statistics as one vector, 1-D.

        Raises:
            PeerLostError: A worker was lost before it was ready, or was not ready in time.
        """
        self._weights = weights
        timeout = self._server_connection.start_timeout
        self._server_connection.reporter.enter("await workers")
        deadline = time.monotonic() + timeout
        while missing := self._not_ready():
            if self.lost:
                reasons = "; ".join(f"rank {loss.rank}: {loss.reason}" for loss in self.lost)
                raise PeerLostError(f"peers were lost before they were ready: {reasons}.")
            if time.monotonic() > deadline:
                ranks = ", ".join(str(rank_of(number)) for number in missing)
                raise PeerLostError(f"not ready within {timeout:g} s: peers of rank {ranks}.")
            self._receive_results(_POLL_SECONDS)

    def _not_ready(self) -> list[int]:
        ready = {number for number, worker in self._workers.items() if worker.ready}
        return sorted(set(range(self._server_connection.context.replicas)) - ready)

    def free(self) -> Collection[int]:
        return [n for n, worker in self._workers.items() if worker.ready and worker.item is None]

    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        remote = self._workers[worker]
        remote.item, remote.since = item, time.monotonic()
        slices, arrays = arrays_for(item)
        has_weights = remote.version != version
        if has_weights:
            assert self._weights is not None, "await_workers comes first"
            arrays.append(self._weights())
            remote.version = version
        try:
            header = {
                "step": item.step,
                "replica": item.replica,
                "slices": slices,
                "has_weights": has_weights,
            }
            remote.connection.send(header, arrays)
        except ConnectionLostError as error:
            self._drop_worker(worker, str(error))

    def collect(self, timeout: float) -> list[WorkResult]:
        results = self._receive_results(timeout)
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if (
                worker.item is not None
                and now - worker.since > self._server_connection.answer_timeout
            ):
                self._drop_worker(worker.number, f"no answer for {now - worker.since:.0f} s")
        self._require_workers()
        return results

    def _receive_results(self, timeout: float) -> list[WorkResult]:
        for rank, connection in self._server.arrivals():
            self._admit(worker_of(rank), connection)
        if not self._workers:
            time.sleep(timeout)
            return []
        workers = {worker.connection.fileno(): worker for worker in self._workers.values()}
        results = (self._read(workers[number]) for number in poll_readable(workers, timeout))
        return [result for result in results if result is not None]

    def _admit(self, number: int, connection: Connection) -> None:
        """Adds a connected worker; closes the connection of one that counts as lost, which then ends."""
        if number in {loss.worker for loss in self.lost}:
            connection.close()
        else:
            self._workers[number] = _Worker(number, connection)

    def _read(self, worker: _Worker) -> WorkResult | None:
        try:
            header, arrays = _receive_message(worker)
        except ConnectionLostError as error:
            self._drop_worker(worker.number, str(error))
            return None
        if worker.item is None:
            worker.ready = True
            return None
        item, worker.item = worker.item, None
        return WorkResult(item, worker.number, worker.version, header["loss"], arrays[0], arrays[1])

    def _drop_worker(self, number: int, reason: str) -> None:
        worker = self._workers.pop(number, None)
        step = None
        if worker is not None:
            worker.connection.close()
            if worker.item is not None:
                step = worker.item.step
                self._lost_items.append(worker.item)
        self.lost.append(report_lost_worker(self._server_connection, number, step, reason))

    def _require_workers(self) -> None:
        if not self._workers:
            raise no_workers_left(self.lost)

    def execution_state(self, worker: int) -> Mapping[str, np.ndarray]:
        remote = self._workers.get(worker)
        if remote is None:
            return {}
        try:
            remote.connection.send({"request": "execution_state"})
            seconds = self._server_connection.answer_timeout
            if not poll_readable([remote.connection.fileno()], seconds):
                raise ConnectionLostError(f"no answer for {seconds:.0f} s")
            header, arrays = _receive_message(remote)
        except ConnectionLostError as error:
            self._drop_worker(worker, str(error))
            return {}
        return dict(zip(header["execution_state"], arrays, strict=True))

    def set_execution_state(self, worker: int, execution_state: Mapping[str, np.ndarray]) -> None:
        remote = self._workers.get(worker)
        if remote is None:
            return
        try:
            remote.connection.send(
                {"execution_state": list(execution_state)}, list(execution_state.values())
            )
        except ConnectionLostError as error:
            self._drop_worker(worker, str(error))

    def lost_items(self) -> list[WorkItem]:
        items, self._lost_items = self._lost_items, []
        return items

    def close(self) -> None:
        self._server.close()
        for worker in self._workers.values():
            worker.connection.close()


def arrays_for(item: WorkItem) -> tuple[list[list[Any]], list[np.ndarray]]:
    """Each slice of a work item as JSON values, and the arrays, of any shapes, that these number."""
    arrays: list[np.ndarray] = []
    slices = [
        [encode_tree(s.inputs, arrays), encode_tree(s.targets, arrays), s.count, s.weight]
        for s in item.slices
    ]
    return slices, arrays


def _receive_message(worker: _Worker) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The next message of a worker: header, and arrays of any shape and dtype.

    Raises:
        PeerLostError: The worker failed; a ConnectionLostError: it is gone.
    """
    header, arrays = worker.connection.receive()
    if "error" in header:
        raise PeerLostError(f"rank {rank_of(worker.number)}, a peer, failed: {header['error']}")
    return header, arrays
