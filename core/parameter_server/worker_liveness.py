"""Worker liveness in parameter-server runs in which the framework's own runtime distributes the work."""

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
    """Detects lost workers: keeps an idle connection to each process, which closes when the process dies.

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
