"""Who is there, where a framework's own runtime hands out the work."""

from __future__ import annotations

import time

from isotrain.core.contracts.process import worker_of
from isotrain.core.contracts.service import Service
from isotrain.core.errors import PeerLostError
from isotrain.core.served.door import Door
from isotrain.core.served.wire import Wire
from isotrain.core.served.workforce import LostWorker, none_left, readable, report_loss

_POLL_SECONDS = 0.1


class Attendance:
    """Keeps a connection to each process that a framework's own runtime lets work, to see who is there.

    Attributes:
        present: The workers that are there, by number.
        lost: Those that were lost.
    """

    def __init__(self, service: Service) -> None:
        self.present: set[int] = set()
        self.lost: list[LostWorker] = []
        self._service = service
        self._door = Door(service.door, service.key)
        self._wires: dict[int, Wire] = {}

    def await_all(self) -> None:
        """Returns once all processes are there.

        Raises:
            PeerLostError: One did not come in time.
        """
        self._service.reporter.enter("await workers")
        deadline = time.monotonic() + self._service.start_timeout
        expected = set(range(1, self._service.context.world_size))
        while missing := expected - self._wires.keys():
            if time.monotonic() > deadline:
                told = ", ".join(map(str, sorted(missing)))
                raise PeerLostError(
                    f"not connected within {self._service.start_timeout:g} s: peers of rank {told}."
                )
            time.sleep(_POLL_SECONDS)
            self._wires.update(self._door.arrivals())
        self.present = set(range(self._service.context.replicas))

    def look(self) -> None:
        """Notices who is gone.

        Raises:
            PeerLostError: No worker is left.
        """
        ranks = {wire.fileno(): rank for rank, wire in self._wires.items()}
        for descriptor in readable(ranks, 0.0):  # nobody here ever says anything
            rank = ranks[descriptor]
            self._wires.pop(rank).close()
            if (worker := worker_of(rank)) in self.present:
                self.present.remove(worker)
                reason = "its connection was closed"
                self.lost.append(report_loss(self._service, worker, None, reason))
        if not self.present:
            raise none_left(self.lost)

    def close(self) -> None:
        """Lets the others end."""
        self._door.close()
        for wire in self._wires.values():
            wire.close()
