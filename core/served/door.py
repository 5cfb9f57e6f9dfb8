"""Where the other processes of a served run connect to its coordinator."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from isotrain.core.served import handshake
from isotrain.core.served.seal import Seals
from isotrain.core.served.wire import Wire
from isotrain.core.served.workforce import readable

_PATIENCE_SECONDS = 3.0
_PLACES = 256
_BREATH_SECONDS = 0.05


class _Refused(Exception):
    """A caller that is none of this run's processes."""


class _Caller:
    """Somebody who has connected and has not proved anything yet.

    Attributes:
        connection: To it; never waits.
        deadline: When its answer must be whole (`time.monotonic`).
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self._greeting = handshake.greet()
        self._heard = b""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # gone: noticed when it is heard
            connection.send(self._greeting)

    def session(self, key: bytes) -> bytes:
        """What only both ends know of the connection, once its answer was right."""
        return handshake.session(self._greeting, self._heard, key)

    def hear(self, key: bytes) -> int | None:
        """Takes what has come of its answer.

        Returns:
            Its rank, with the confirmation sent; None while something is missing.

        Raises:
            _Refused: It is gone, or has proved that it does not belong here.
        """
        try:
            part = self.connection.recv(handshake.ANSWER_BYTES - len(self._heard))
        except BlockingIOError:  # it only seemed that something had come
            return None
        except OSError as error:
            raise _Refused from error
        self._heard += part
        if not part or not handshake.may_become_answer(self._heard):
            raise _Refused
        if len(self._heard) < handshake.ANSWER_BYTES:
            return None
        return self._admitted(key)

    def _admitted(self, key: bytes) -> int:
        rank = handshake.proven_rank(self._greeting, self._heard, key)
        if rank is None:
            raise _Refused
        try:
            self.connection.send(handshake.confirm(self._greeting, self._heard, key))
        except OSError as error:
            raise _Refused from error
        self.connection.setblocking(True)
        return rank


class Door:
    """Where the other processes of a served run connect; strangers are turned away.

    A thread hears all callers at once. Who has not proved within a short time that it has the run's key is
    dropped, however much or little it says until then; who says something else, at once.

    Attributes:
        address: Host and port.
        refused: How many were turned away so far.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        patience: float = _PATIENCE_SECONDS,
        places: int = _PLACES,
        *,
        seals: bool = False,
    ) -> None:
        """Listens, on this address alone.

        Args:
            address: Host and port; port 0 is any that is free.
            key: Of this run.
            patience: Seconds in which a caller must have proved that it has the key.
            places: So many callers are heard at once; more wait until a place is free.
            seals: Whether the messages of those who come in are sealed.
        """
        self.refused = 0
        self._key = key
        self._patience = patience
        self._places = places
        self._seals = seals
        self._listener = socket.create_server(address, backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._bell, self._ringer = socket.socketpair()
        self._callers: dict[int, _Caller] = {}
        self._lock = threading.Lock()
        self._arrived: list[tuple[int, Wire]] = []
        self._thread = threading.Thread(target=self._serve, name="isotrain-door", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Until the bell rings."""
        while True:
            begun = time.monotonic()
            heard = readable(self._watched(), self._until_next_deadline(begun))
            if self._bell.fileno() in heard:
                return
            for descriptor in heard:
                if descriptor == self._listener.fileno():
                    self._let_call()
                else:
                    self._hear(descriptor)
            self._drop_late(begun)

    def _watched(self) -> list[int]:
        watched = [self._bell.fileno(), *self._callers]
        if len(self._callers) < self._places:
            watched.append(self._listener.fileno())
        return watched

    def _until_next_deadline(self, now: float) -> float | None:
        if not self._callers:
            return None
        return max(0.0, min(caller.deadline for caller in self._callers.values()) - now)

    def _let_call(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the caller is gone again, or this process may open no more files now
            time.sleep(_BREATH_SECONDS)
            return
        caller = _Caller(connection, time.monotonic() + self._patience)
        self._callers[connection.fileno()] = caller

    def _hear(self, descriptor: int) -> None:
        caller = self._callers[descriptor]
        try:
            rank = caller.hear(self._key)
        except _Refused:
            self._drop(descriptor)
            return
        if rank is not None:
            del self._callers[descriptor]
            with self._lock:
                self._arrived.append((rank, Wire(caller.connection, self._seals_of(caller))))

    def _seals_of(self, caller: _Caller) -> Seals | None:
        return Seals.made(caller.session(self._key), is_caller=False) if self._seals else None

    def _drop_late(self, begun: float) -> None:
        """Drops those whose time was over before this look began: what they had said is heard."""
        late = [number for number, caller in self._callers.items() if caller.deadline <= begun]
        for descriptor in late:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self.refused += 1
        self._callers.pop(descriptor).connection.close()

    def arrivals(self) -> list[tuple[int, Wire]]:
        """Ranks and connections of those who came since the last call."""
        with self._lock:
            found, self._arrived = self._arrived, []
        return found

    def close(self) -> None:
        """Listens no more; whoever still waits is turned away."""
        self._ringer.close()
        self._thread.join()
        for descriptor in list(self._callers):
            self._drop(descriptor)
        for _, wire in self.arrivals():
            wire.close()
        self._bell.close()
        self._listener.close()
