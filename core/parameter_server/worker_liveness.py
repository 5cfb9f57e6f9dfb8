"""Who is there, where a framework's own runtime hands out the work."""

from __future__ import annotations

import time

from isotrain.core.contracts.process import ServerConnection, worker_of
from isotrain.core.errors import PeerLostError
from isotrain.core.parameter_server.worker_pool import (
    LostWorker,
    no_workers_left,
    report_lost_worker,
)
from isotrain.core.system.process import poll_readable
from isotrain.core.transport.connection import Connection
from isotrain.core.transport.server import AuthenticatedServer

_POLL_SECONDS = 0.1


class WorkerLiveness:
    """Keeps a connection to each process that a framework's own runtime lets work, to see who is there.

    Attributes:
        present: The workers that are there, by number.
        lost: Those that were lost.
    """

    def __init__(self, server_connection: ServerConnection) -> None:
        self.present: set[int] = set()
        self.lost: list[LostWorker] = []
        self._server_connection = server_connection
        self._door = AuthenticatedServer(server_connection.server_address, server_connection.key)
        self._wires: dict[int, Connection] = {}

    def await_all(self) -> None:
        """Returns once all processes are there.

        Raises:
            PeerLostError: One did not come in time.
        """
        self._server_connection.reporter.enter("await workers")
        deadline = time.monotonic() + self._server_connection.start_timeout
        expected = set(range(1, self._server_connection.context.world_size))
        while missing := expected - self._wires.keys():
            if time.monotonic() > deadline:
                told = ", ".join(map(str, sorted(missing)))
                raise PeerLostError(
                    f"not connected within {self._server_connection.start_timeout:g} s: peers of rank {told}."
                )
            time.sleep(_POLL_SECONDS)
            self._wires.update(self._door.arrivals())
        self.present = set(range(self._server_connection.context.replicas))

    def poll(self) -> None:
        """Notices who is gone.

        Raises:
            PeerLostError: No worker is left.
        """
        ranks = {wire.fileno(): rank for rank, wire in self._wires.items()}
        for descriptor in poll_readable(ranks, 0.0):  # nobody here ever says anything
            rank = ranks[descriptor]
            self._wires.pop(rank).close()
            if (worker := worker_of(rank)) in self.present:
                self.present.remove(worker)
                reason = "its connection was closed"
                self.lost.append(report_lost_worker(self._server_connection, worker, None, reason))
        if not self.present:
            raise no_workers_left(self.lost)

    def close(self) -> None:
        """Lets the others end."""
        self._door.close()
        for wire in self._wires.values():
            wire.close()
