"""Where the other processes of a parameter-server run connect to its coordinator."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

from isotrain.core.system.process import poll_readable
from isotrain.core.transport import auth
from isotrain.core.transport.connection import Connection
from isotrain.core.transport.encryption import EncryptionOffer, certificate_rejected, mismatch
from isotrain.core.transport.message_auth import MacPair

if TYPE_CHECKING:
    from isotrain.core.transport.tls import TlsEndpoint


_CHUNK = 1 << 16


class ConnectionRejectedError(Exception):
    """It is gone, or has proved that it does not belong here."""


class PendingConnection:
    """Hears what somebody says, a part after the other, and never waits.

    Attributes:
        connection: To it.
        deadline: When it must be in (`time.monotonic`).
        rank: Of it, once it has proved that.
        rejected: Why the two cannot talk, though it is one of this run's processes; empty: nothing is wrong.
    """

    def __init__(
        self, connection: socket.socket, deadline: float, key: bytes, terms: EncryptionOffer | None
    ) -> None:
        """Greets it.

        Args:
            connection: To it.
            deadline: When it must be in.
            key: Of the run.
            terms: As the door has them.
        """
        self.connection = connection
        self.deadline = deadline
        self._key = key
        self._seals = terms is not None
        self._terms = terms or EncryptionOffer()
        self._greeting = auth.greet()
        self._heard = b""
        self.rank = 0
        self.rejected = ""
        self._tls: TlsEndpoint | None = None
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # gone: noticed when it is heard
            connection.send(self._greeting)

    def on_readable(self) -> tuple[int, Connection] | None:
        """Takes what has come.

        Returns:
            Its rank, and the connection; None while something is missing.

        Raises:
            ConnectionRejectedError: It is gone, or does not belong here.
        """
        try:
            if self.rejected:
                self._see_off()
                return None
            if self._tls is None:
                part = self.connection.recv(auth.ANSWER_BYTES - len(self._heard))
                return self._prove(part)
            return self._encrypt(self._tls, self.connection.recv(_CHUNK))
        except BlockingIOError:  # it only seemed that something had come
            return None
        except OSError as error:
            raise ConnectionRejectedError from error

    def _prove(self, part: bytes) -> tuple[int, Connection] | None:
        self._heard += part
        if not part or not auth.may_become_answer(self._heard):
            raise ConnectionRejectedError
        if len(self._heard) < auth.ANSWER_BYTES:
            return None
        rank = auth.proven_rank(self._greeting, self._heard, self._key)
        if rank is None:
            raise ConnectionRejectedError
        self.rank = rank
        self.rejected = mismatch(rank, auth.offer_of(self._heard), self._terms)
        self._say(auth.confirm(self._greeting, self._heard, self._key, self._terms))
        if self.rejected:
            return None
        if self._terms.tls is None:
            return self._let_in(self._session)
        self._tls = self._terms.tls.begin(is_caller=False)
        return None

    def _encrypt(self, tls: TlsEndpoint, part: bytes) -> tuple[int, Connection] | None:
        if not part:
            raise ConnectionRejectedError
        answer = tls.do_handshake(part)
        self.rejected = certificate_rejected(0, self.rank, tls.problem) if tls.problem else ""
        self._say(answer)
        if not tls.is_ready:
            return None
        session = auth.bound(self._session, tls.binding)
        self._say(b"".join(tls.encrypted(auth.acceptance(session))))
        return self._let_in(session)

    def _say(self, text: bytes) -> None:
        """Says it; to one that cannot be talked with as the last word.

        Raises:
            ConnectionRejectedError: It takes nothing in.
        """
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self.connection.send(text)
        if sent < len(text):
            raise ConnectionRejectedError
        if self.rejected:
            self.connection.shutdown(socket.SHUT_WR)

    def _see_off(self) -> None:
        """Waits until it hangs up: what is closed with something unread takes the last word back."""
        if not self.connection.recv(_CHUNK):
            raise ConnectionRejectedError

    @property
    def _session(self) -> bytes:
        """What only both ends know of the connection, once its answer was right."""
        return auth.session(self._greeting, self._heard, self._key)

    def _let_in(self, session: bytes) -> tuple[int, Connection]:
        self.connection.setblocking(True)
        seals = MacPair.derive(session, is_caller=False) if self._seals else None
        return self.rank, Connection(self.connection, seals, self._tls)


_PATIENCE_SECONDS = 3.0
_PLACES = 256
_BREATH_SECONDS = 0.05


class AuthenticatedServer:
    """Where the other processes of a parameter-server run connect; strangers are turned away.

    A thread hears all callers at once. Who has not proved within a short time that it has the run's key is
    dropped, however much or little it says until then; who says something else, at once.

    Attributes:
        address: Host and port.
        refused: How many were turned away so far.
        rejected: Why the run's own processes were, by rank: they encrypt otherwise, or a certificate is not
            accepted. They know.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        patience: float = _PATIENCE_SECONDS,
        places: int = _PLACES,
        *,
        terms: EncryptionOffer | None = None,
    ) -> None:
        """Listens, on this address alone.

        Args:
            address: Host and port; port 0 is any that is free.
            key: Of this run.
            patience: Seconds in which a caller must have proved that it has the key.
            places: So many callers are heard at once; more wait until a place is free.
            terms: Of this process, where the messages of those who come in are sealed; None: they are not.
        """
        self.refused = 0
        self.rejected: dict[int, str] = {}
        self._key = key
        self._patience = patience
        self._places = places
        self._terms = terms
        self._listener = socket.create_server(address, backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._bell, self._ringer = socket.socketpair()
        self._callers: dict[int, PendingConnection] = {}
        self._lock = threading.Lock()
        self._arrived: list[tuple[int, Connection]] = []
        self._thread = threading.Thread(target=self._serve, name="isotrain-door", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Until the bell rings."""
        while True:
            begun = time.monotonic()
            heard = poll_readable(self._watched(), self._until_next_deadline(begun))
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
        caller = PendingConnection(
            connection, time.monotonic() + self._patience, self._key, self._terms
        )
        self._callers[connection.fileno()] = caller

    def _hear(self, descriptor: int) -> None:
        try:
            arrived = self._callers[descriptor].on_readable()
        except (
            Exception
        ):  # refused; or nobody thought of it, and a caller cannot close the door for others
            self._drop(descriptor)
            return
        if arrived is not None:
            del self._callers[descriptor]
            with self._lock:
                self._arrived.append(arrived)

    def _drop_late(self, begun: float) -> None:
        """Drops those whose time was over before this look began: what they had said is heard."""
        late = [number for number, caller in self._callers.items() if caller.deadline <= begun]
        for descriptor in late:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self.refused += 1
        caller = self._callers.pop(descriptor)
        caller.connection.close()
        if caller.rejected:
            self.rejected[caller.rank] = caller.rejected

    def arrivals(self) -> list[tuple[int, Connection]]:
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
