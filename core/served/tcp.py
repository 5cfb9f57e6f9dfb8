"""Workers that are sent weights and slices over TCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.contracts.process import rank_of, worker_of
from isotrain.core.contracts.service import Service
from isotrain.core.errors import PeerLostError
from isotrain.core.served.door import Door
from isotrain.core.served.ledger import Unit
from isotrain.core.served.wire import Wire, WireError, packed
from isotrain.core.served.workforce import (
    Answer,
    LostWorker,
    Workforce,
    none_left,
    readable,
    report_loss,
)

_POLL_SECONDS = 0.1


@dataclass
class _Worker:
    number: int
    wire: Wire
    ready: bool = False
    unit: Unit | None = None
    since: float = 0.0
    version: int = -1


class TcpWorkforce(Workforce):
    """One connection to each worker; a worker is its replica's number."""

    def __init__(self, service: Service) -> None:
        """Opens the door; `await_workers` lets the workers in."""
        self.lost: list[LostWorker] = []
        self._service = service
        self._weights: Callable[[], np.ndarray] | None = None
        self._door = Door(service.door, service.key)
        self._workers: dict[int, _Worker] = {}
        self._given_back: list[Unit] = []

    def await_workers(self, weights: Callable[[], np.ndarray]) -> None:
        """Returns once all workers are ready.

        Args:
            weights: Gives the newest weights and moving statistics as one vector.

        Raises:
            PeerLostError: One was lost before it was ready, or was not ready in time.
        """
        self._weights = weights
        patience = self._service.start_timeout
        self._service.reporter.enter("await workers")
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
        return sorted(set(range(self._service.context.replicas)) - ready)

    def free(self) -> Collection[int]:
        return [n for n, worker in self._workers.items() if worker.ready and worker.unit is None]

    def hand_out(self, worker: int, unit: Unit, version: int) -> None:
        known = self._workers[worker]
        known.unit, known.since = unit, time.monotonic()
        arrays: list[np.ndarray] = []
        pieces = [
            [packed(p.inputs, arrays), packed(p.targets, arrays), p.count, p.weight]
            for p in unit.pieces
        ]
        newer = known.version != version
        if newer:
            assert self._weights is not None, "await_workers comes first"
            arrays.append(self._weights())
            known.version = version
        try:
            header = {"step": unit.step, "replica": unit.replica, "pieces": pieces, "newer": newer}
            known.wire.send(header, arrays)
        except WireError as error:
            self._lose(worker, str(error))

    def collect(self, patience: float) -> list[Answer]:
        answers = self._answers(patience)
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.unit is not None and now - worker.since > self._service.answer_timeout:
                self._lose(worker.number, f"no answer for {now - worker.since:.0f} s")
        self._require_some()
        return answers

    def _answers(self, patience: float) -> list[Answer]:
        for rank, wire in self._door.arrivals():
            self._admit(worker_of(rank), wire)
        if not self._workers:
            time.sleep(patience)
            return []
        wires = {worker.wire.fileno(): worker for worker in self._workers.values()}
        answers = (self._read(wires[number]) for number in readable(wires, patience))
        return [answer for answer in answers if answer is not None]

    def _admit(self, number: int, wire: Wire) -> None:
        """Lets a worker in; one that is taken for lost stays outside, and ends."""
        if number in {loss.worker for loss in self.lost}:
            wire.close()
        else:
            self._workers[number] = _Worker(number, wire)

    def _read(self, worker: _Worker) -> Answer | None:
        try:
            header, arrays = _received(worker)
        except WireError as error:
            self._lose(worker.number, str(error))
            return None
        if worker.unit is None:
            worker.ready = True
            return None
        unit, worker.unit = worker.unit, None
        return Answer(unit, worker.number, worker.version, header["loss"], arrays[0], arrays[1])

    def _lose(self, number: int, reason: str) -> None:
        worker = self._workers.pop(number, None)
        step = None
        if worker is not None:
            worker.wire.close()
            if worker.unit is not None:
                step = worker.unit.step
                self._given_back.append(worker.unit)
        self.lost.append(report_loss(self._service, number, step, reason))

    def _require_some(self) -> None:
        if not self._workers:
            raise none_left(self.lost)

    def habits(self, worker: int) -> Mapping[str, np.ndarray]:
        known = self._workers.get(worker)
        if known is None:
            return {}
        try:
            known.wire.send({"asked": True})
            seconds = self._service.answer_timeout
            if not readable([known.wire.fileno()], seconds):
                raise WireError(f"no answer for {seconds:.0f} s")
            header, arrays = _received(known)
        except WireError as error:
            self._lose(worker, str(error))
            return {}
        return dict(zip(header["habits"], arrays, strict=True))

    def set_habits(self, worker: int, habits: Mapping[str, np.ndarray]) -> None:
        known = self._workers.get(worker)
        if known is None:
            return
        try:
            known.wire.send({"habits": list(habits)}, list(habits.values()))
        except WireError as error:
            self._lose(worker, str(error))

    def given_back(self) -> list[Unit]:
        units, self._given_back = self._given_back, []
        return units

    def close(self) -> None:
        self._door.close()
        for worker in self._workers.values():
            worker.wire.close()


def _received(worker: _Worker) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What a worker says next.

    Raises:
        PeerLostError: It failed; as a WireError: it is gone.
    """
    header, arrays = worker.wire.receive()
    if "error" in header:
        raise PeerLostError(f"rank {rank_of(worker.number)}, a peer, failed: {header['error']}")
    return header, arrays
