"""How a caller comes to a connection whose messages are sealed, and encrypted where both ends want that."""

from __future__ import annotations

import contextlib
import hmac
import socket
from typing import TYPE_CHECKING

from isotrain.core.errors import PlanError
from isotrain.core.transport import auth
from isotrain.core.transport.connection import Connection, ConnectionLostError, authenticate
from isotrain.core.transport.encryption import EncryptionOffer, certificate_rejected, mismatch
from isotrain.core.transport.message_auth import MacPair

if TYPE_CHECKING:
    from isotrain.core.transport.tls import Tls, TlsEndpoint

_CHUNK = 1 << 16
_RECORD_HEADER = 5
"""Bytes of TLS before each record; the last two are its length."""


def client_handshake(
    connection: socket.socket, key: bytes, rank: int, terms: EncryptionOffer
) -> Connection | None:
    """Calls rank 0; None where that hung up.

    Args:
        connection: To it; its timeout is the longest that each answer may take.
        key: Of the run.
        rank: Of this process.
        terms: Of this process.

    Raises:
        PlanError: It is rank 0, and the two cannot talk: one encrypts and the other does not, or the one does
            not trust the other.
        ConnectionLostError: It is no rank 0 of this run.
    """
    met = authenticate(connection, key, rank, terms)
    if met is None:
        return None
    session, theirs = met
    why = mismatch(rank, terms, theirs)
    if why:
        raise PlanError(why)
    if terms.tls is None:
        return Connection(connection, MacPair.derive(session, is_caller=True))
    tls = _encrypting(connection, terms.tls, rank)
    return None if tls is None else _welcomed(connection, tls, session, rank)


def _encrypting(connection: socket.socket, own: Tls, rank: int) -> TlsEndpoint | None:
    """This end, after the handshake."""
    tls = own.begin(is_caller=True)
    heard = b""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(tls.do_handshake(heard))
            if tls.problem:
                _part(connection)
                raise PlanError(certificate_rejected(rank, 0, tls.problem))
            if tls.is_ready:
                return tls
            heard = _record(connection)
    return None


def _welcomed(
    connection: socket.socket, tls: TlsEndpoint, session: bytes, rank: int
) -> Connection | None:
    """The connection, once rank 0 has said that it accepts this process's certificate."""
    session = auth.bound(session, tls.binding)
    heard = b""
    try:
        while len(heard) < auth.ACCEPTANCE_BYTES:
            heard += tls.decrypted(_record(connection))
    except OSError as error:
        if tls.problem:
            raise PlanError(certificate_rejected(rank, 0, tls.problem)) from error
        return None
    if not hmac.compare_digest(heard, auth.acceptance(session)):
        raise ConnectionLostError(
            "somebody sits between this process and who listens there, and reads along"
        )
    return Connection(connection, MacPair.derive(session, is_caller=True), tls)


def _part(connection: socket.socket) -> None:
    """Waits until rank 0 has heard the last word: what is closed with something unread takes that back."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(_CHUNK):
            pass


def _record(connection: socket.socket) -> bytes:
    """The next record, and nothing of what follows: that is for those who wait for messages.

    Raises:
        OSError: The other end hung up.
    """
    header = _exactly(connection, _RECORD_HEADER)
    return header + _exactly(connection, int.from_bytes(header[-2:], "big"))


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionResetError
        found += part
    return found
