"""Workers that are sent weights and slices over TCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.contracts.process import ServerConnection, rank_of, worker_of
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
from isotrain.core.transport.codec import encode_tree
from isotrain.core.transport.connection import Connection, ConnectionLostError
from isotrain.core.transport.server import AuthenticatedServer

_POLL_SECONDS = 0.1


@dataclass
class _Worker:
    number: int
    wire: Connection
    ready: bool = False
    item: WorkItem | None = None
    since: float = 0.0
    version: int = -1


class TcpWorkerPool(WorkerPool):
    """One connection to each worker; a worker is its replica's number."""

    def __init__(self, server_connection: ServerConnection) -> None:
        """Opens the door; `await_workers` lets the workers in."""
        self.lost: list[LostWorker] = []
        self._server_connection = server_connection
        self._weights: Callable[[], np.ndarray] | None = None
        self._door = AuthenticatedServer(server_connection.server_address, server_connection.key)
        self._workers: dict[int, _Worker] = {}
        self._given_back: list[WorkItem] = []

    def await_workers(self, weights: Callable[[], np.ndarray]) -> None:
        """Returns once all workers are ready.

        Args:
            weights: Gives the newest weights and moving statistics as one vector.

        Raises:
            PeerLostError: One was lost before it was ready, or was not ready in time.
        """
        self._weights = weights
        patience = self._server_connection.start_timeout
        self._server_connection.reporter.enter("await workers")
        deadline = time.monotonic() + patience
        while missing := self._not_ready():
            if self.lost:
                told = "; ".join(f"rank {loss.rank}: {loss.reason}" for loss in self.lost)
                raise PeerLostError(f"peers were lost before they were ready: {told}.")
            if time.monotonic() > deadline:
                told = ", ".join(str(rank_of(number)) for number in missing)
                raise PeerLostError(f"not ready within {patience:g} s: peers of rank {told}.")
            self._answers(_POLL_SECONDS)

    def _not_ready(self) -> list[int]:
        ready = {number for number, worker in self._workers.items() if worker.ready}
        return sorted(set(range(self._server_connection.context.replicas)) - ready)

    def free(self) -> Collection[int]:
        return [n for n, worker in self._workers.items() if worker.ready and worker.item is None]

    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        known = self._workers[worker]
        known.item, known.since = item, time.monotonic()
        arrays: list[np.ndarray] = []
        pieces = [
            [encode_tree(p.inputs, arrays), encode_tree(p.targets, arrays), p.count, p.weight]
            for p in item.slices
        ]
        newer = known.version != version
        if newer:
            assert self._weights is not None, "await_workers comes first"
            arrays.append(self._weights())
            known.version = version
        try:
            header = {"step": item.step, "replica": item.replica, "pieces": pieces, "newer": newer}
            known.wire.send(header, arrays)
        except ConnectionLostError as error:
            self._lose(worker, str(error))

    def collect(self, patience: float) -> list[WorkResult]:
        answers = self._answers(patience)
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if (
                worker.item is not None
                and now - worker.since > self._server_connection.answer_timeout
            ):
                self._lose(worker.number, f"no answer for {now - worker.since:.0f} s")
        self._require_some()
        return answers

    def _answers(self, patience: float) -> list[WorkResult]:
        for rank, wire in self._door.arrivals():
            self._admit(worker_of(rank), wire)
        if not self._workers:
            time.sleep(patience)
            return []
        wires = {worker.wire.fileno(): worker for worker in self._workers.values()}
        answers = (self._read(wires[number]) for number in poll_readable(wires, patience))
        return [answer for answer in answers if answer is not None]

    def _admit(self, number: int, wire: Connection) -> None:
        """Lets a worker in; one that is taken for lost stays outside, and ends."""
        if number in {loss.worker for loss in self.lost}:
            wire.close()
        else:
            self._workers[number] = _Worker(number, wire)

    def _read(self, worker: _Worker) -> WorkResult | None:
        try:
            header, arrays = _received(worker)
        except ConnectionLostError as error:
            self._lose(worker.number, str(error))
            return None
        if worker.item is None:
            worker.ready = True
            return None
        item, worker.item = worker.item, None
        return WorkResult(item, worker.number, worker.version, header["loss"], arrays[0], arrays[1])

    def _lose(self, number: int, reason: str) -> None:
        worker = self._workers.pop(number, None)
        step = None
        if worker is not None:
            worker.wire.close()
            if worker.item is not None:
                step = worker.item.step
                self._given_back.append(worker.item)
        self.lost.append(report_lost_worker(self._server_connection, number, step, reason))

    def _require_some(self) -> None:
        if not self._workers:
            raise no_workers_left(self.lost)

    def execution_state(self, worker: int) -> Mapping[str, np.ndarray]:
        known = self._workers.get(worker)
        if known is None:
            return {}
        try:
            known.wire.send({"asked": True})
            seconds = self._server_connection.answer_timeout
            if not poll_readable([known.wire.fileno()], seconds):
                raise ConnectionLostError(f"no answer for {seconds:.0f} s")
            header, arrays = _received(known)
        except ConnectionLostError as error:
            self._lose(worker, str(error))
            return {}
        return dict(zip(header["execution_state"], arrays, strict=True))

    def set_execution_state(self, worker: int, execution_state: Mapping[str, np.ndarray]) -> None:
        known = self._workers.get(worker)
        if known is None:
            return
        try:
            known.wire.send(
                {"execution_state": list(execution_state)}, list(execution_state.values())
            )
        except ConnectionLostError as error:
            self._lose(worker, str(error))

    def lost_items(self) -> list[WorkItem]:
        items, self._given_back = self._given_back, []
        return items

    def close(self) -> None:
        self._door.close()
        for worker in self._workers.values():
            worker.wire.close()


def _received(worker: _Worker) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What a worker says next.

    Raises:
        PeerLostError: It failed; as a ConnectionLostError: it is gone.
    """
    header, arrays = worker.wire.receive()
    if "error" in header:
        raise PeerLostError(f"rank {rank_of(worker.number)}, a peer, failed: {header['error']}")
    return header, arrays
