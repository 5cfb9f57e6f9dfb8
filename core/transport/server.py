"""Server that accepts only clients with the run's key; authenticates all pending clients in one thread."""

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
    """The client is gone, or has failed the authentication."""


class PendingConnection:
    """A client in the middle of the handshake; a state machine that never blocks.

    Attributes:
        connection: Socket to the client.
        deadline: Time by which its handshake must be done (`time.monotonic`).
        rank: Rank of the client, once authenticated.
        rejected: Reason why an authenticated client is rejected (encryption); empty: it is not.
    """

    def __init__(
        self, connection: socket.socket, deadline: float, key: bytes, offer: EncryptionOffer | None
    ) -> None:
        """Sends the challenge.

        Args:
            connection: Socket to the client.
            deadline: Time by which its handshake must be done (`time.monotonic`).
            key: Secret key of the run.
            offer: Encryption offer of this process; None: messages have no MAC, and are not encrypted.
        """
        self.connection = connection
        self.deadline = deadline
        self._key = key
        self._has_macs = offer is not None
        self._offer = offer or EncryptionOffer()
        self._challenge = auth.new_challenge()
        self._answer = b""
        self.rank = 0
        self.rejected = ""
        self._tls: TlsEndpoint | None = None
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # gone: noticed at the next read
            connection.send(self._challenge)

    def on_readable(self) -> tuple[int, Connection] | None:
        """Reads what the client has sent, and goes on with the handshake.

        Returns:
            The client's rank and connection; None while the handshake is not done.

        Raises:
            ConnectionRejectedError: The client is gone, or has failed the authentication.
        """
        try:
            if self.rejected:
                self._await_close()
                return None
            if self._tls is None:
                part = self.connection.recv(auth.ANSWER_BYTES - len(self._answer))
                return self._authenticate(part)
            return self._encrypt(self._tls, self.connection.recv(_CHUNK))
        except BlockingIOError:  # spurious wake-up
            return None
        except OSError as error:
            raise ConnectionRejectedError from error

    def _authenticate(self, part: bytes) -> tuple[int, Connection] | None:
        self._answer += part
        if not part or not auth.is_answer_prefix(self._answer):
            raise ConnectionRejectedError
        if len(self._answer) < auth.ANSWER_BYTES:
            return None
        rank = auth.verify_answer(self._challenge, self._answer, self._key)
        if rank is None:
            raise ConnectionRejectedError
        self.rank = rank
        self.rejected = mismatch(rank, auth.offer_in_answer(self._answer), self._offer)
        self._send(auth.confirm_answer(self._challenge, self._answer, self._key, self._offer))
        if self.rejected:
            return None
        if self._offer.tls is None:
            return self._accept(self._session)
        self._tls = self._offer.tls.new_endpoint(is_client=False)
        return None

    def _encrypt(self, tls: TlsEndpoint, part: bytes) -> tuple[int, Connection] | None:
        if not part:
            raise ConnectionRejectedError
        reply = tls.do_handshake(part)
        self.rejected = certificate_rejected(0, self.rank, tls.problem) if tls.problem else ""
        self._send(reply)
        if not tls.is_ready:
            return None
        session = auth.bind_to_tls(self._session, tls.channel_binding)
        self._send(b"".join(tls.encrypted(auth.acceptance(session))))
        return self._accept(session)

    def _send(self, message: bytes) -> None:
        """Sends a message; to a rejected client as the last one.

        Raises:
            ConnectionRejectedError: The client reads nothing.
        """
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self.connection.send(message)
        if sent < len(message):
            raise ConnectionRejectedError
        if self.rejected:
            self.connection.shutdown(socket.SHUT_WR)

    def _await_close(self) -> None:
        """Waits for the client to close: closing with unread input would discard the last message (RST)."""
        if not self.connection.recv(_CHUNK):
            raise ConnectionRejectedError

    @property
    def _session(self) -> bytes:
        """Session key, once the answer is verified."""
        return auth.session_key(self._challenge, self._answer, self._key)

    def _accept(self, session: bytes) -> tuple[int, Connection]:
        self.connection.setblocking(True)
        macs = MacPair.derive(session, is_client=False) if self._has_macs else None
        return self.rank, Connection(self.connection, macs, self._tls)


_HANDSHAKE_SECONDS = 3.0
_MAX_PENDING = 256
_ACCEPT_RETRY_SECONDS = 0.05


class AuthenticatedServer:
    """A TCP server for the other ranks of a run; clients without the run's key are rejected.

    One thread serves all pending clients. A client that has not proved within a few seconds that it has the
    run's key is dropped, however much it sends; a client of another protocol is dropped at once.

    Attributes:
        address: Host and port.
        rejected_clients: Number of clients rejected so far.
        rejected: Reasons why ranks of this run were rejected, by rank: encryption mismatch, or certificate
            rejected. Those ranks have been told.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        handshake_timeout: float = _HANDSHAKE_SECONDS,
        max_pending: int = _MAX_PENDING,
        *,
        offer: EncryptionOffer | None = None,
    ) -> None:
        """Listens on this address only.

        Args:
            address: Host and port; port 0: any free port.
            key: Secret key of the run.
            handshake_timeout: Seconds in which a client must prove that it has the key.
            max_pending: Maximum clients in the handshake at once; further ones wait in the listen queue.
            offer: Encryption offer of this process, for connections with MACs; None: no MACs, no encryption.
        """
        self.rejected_clients = 0
        self.rejected: dict[int, str] = {}
        self._key = key
        self._handshake_timeout = handshake_timeout
        self._max_pending = max_pending
        self._offer = offer
        self._listener = socket.create_server(address, backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._pending: dict[int, PendingConnection] = {}
        self._lock = threading.Lock()
        self._arrived: list[tuple[int, Connection]] = []
        self._thread = threading.Thread(target=self._serve, name="isotrain-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Loop of the thread, until `close`."""
        while True:
            began = time.monotonic()
            readable = poll_readable(self._watched(), self._until_next_deadline(began))
            if self._stop_reader.fileno() in readable:
                return
            for descriptor in readable:
                if descriptor == self._listener.fileno():
                    self._accept_client()
                else:
                    self._advance(descriptor)
            self._drop_late(began)

    def _watched(self) -> list[int]:
        watched = [self._stop_reader.fileno(), *self._pending]
        if len(self._pending) < self._max_pending:
            watched.append(self._listener.fileno())
        return watched

    def _until_next_deadline(self, now: float) -> float | None:
        if not self._pending:
            return None
        return max(0.0, min(client.deadline for client in self._pending.values()) - now)

    def _accept_client(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client is gone again, or this process has no free file descriptor
            time.sleep(_ACCEPT_RETRY_SECONDS)
            return
        deadline = time.monotonic() + self._handshake_timeout
        client = PendingConnection(connection, deadline, self._key, self._offer)
        self._pending[connection.fileno()] = client

    def _advance(self, descriptor: int) -> None:
        try:
            arrived = self._pending[descriptor].on_readable()
        except Exception:  # rejected; or unexpected, and one client must not stop the server
            self._drop(descriptor)
            return
        if arrived is not None:
            del self._pending[descriptor]
            with self._lock:
                self._arrived.append(arrived)

    def _drop_late(self, began: float) -> None:
        """Drops clients whose deadline had passed when this round began: their input has been read."""
        late = [number for number, client in self._pending.items() if client.deadline <= began]
        for descriptor in late:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self.rejected_clients += 1
        client = self._pending.pop(descriptor)
        client.connection.close()
        if client.rejected:
            self.rejected[client.rank] = client.rejected

    def arrivals(self) -> list[tuple[int, Connection]]:
        """Ranks and connections of the clients accepted since the last call."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Stops listening, and closes all pending and unclaimed connections."""
        self._stop_writer.close()
        self._thread.join()
        for descriptor in list(self._pending):
            self._drop(descriptor)
        for _, connection in self.arrivals():
            connection.close()
        self._stop_reader.close()
        self._listener.close()
