"""Where the other processes of a served run connect to its coordinator."""

from __future__ import annotations

import socket
import threading

from isotrain.core.contracts.service import Service
from isotrain.core.served.wire import Wire, WireError, accept


class Door:
    """Where the other processes of a served run connect; strangers are turned away."""

    def __init__(self, service: Service) -> None:
        """Listens, on the address of the coordinator alone."""
        self._key = service.key
        self._listener = socket.create_server(service.door, backlog=128)
        self._lock = threading.Lock()
        self._arrived: list[tuple[int, Wire]] = []
        threading.Thread(target=self._serve, name="isotrain-door", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                wire = accept(self._listener, self._key)
            except OSError:  # closed
                return
            if wire is None:
                continue
            try:
                hello, _ = wire.receive()
            except WireError:
                wire.close()
                continue
            with self._lock:
                self._arrived.append((hello["rank"], wire))

    def arrivals(self) -> list[tuple[int, Wire]]:
        """Ranks and connections of those who came since the last call."""
        with self._lock:
            found, self._arrived = self._arrived, []
        return found

    def close(self) -> None:
        """Listens no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
