"""Client side of the handshake: challenge-response, then TLS if both ends offer it, then MACs."""

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
"""Bytes of a TLS record header; the last two are the record's length."""


def client_handshake(
    connection: socket.socket, key: bytes, rank: int, offer: EncryptionOffer
) -> Connection | None:
    """Connects this process to rank 0 over an open socket.

    Returns:
        The authenticated connection; None if rank 0 closed it first.

    Raises:
        PlanError: The encryption offers do not match, or one end rejects the other's certificate.
        ConnectionLostError: The server is not rank 0 of this run.
    """
    authenticated = authenticate(connection, key, rank, offer)
    if authenticated is None:
        return None
    session, server_offer = authenticated
    problem = mismatch(rank, offer, server_offer)
    if problem:
        raise PlanError(problem)
    if offer.tls is None:
        return Connection(connection, MacPair.derive(session, is_client=True))
    endpoint = _tls_handshake(connection, offer.tls, rank)
    return None if endpoint is None else _await_acceptance(connection, endpoint, session, rank)


def _tls_handshake(connection: socket.socket, tls: Tls, rank: int) -> TlsEndpoint | None:
    """This end of the TLS connection; None if rank 0 closed it."""
    endpoint = tls.new_endpoint(is_client=True)
    received = b""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(endpoint.do_handshake(received))
            if endpoint.problem:
                _await_close(connection)
                raise PlanError(certificate_rejected(rank, 0, endpoint.problem))
            if endpoint.is_ready:
                return endpoint
            received = _receive_record(connection)
    return None


def _await_acceptance(
    connection: socket.socket, tls: TlsEndpoint, session: bytes, rank: int
) -> Connection | None:
    """The connection, once rank 0 has accepted this process's certificate; None if rank 0 closed it."""
    session = auth.bind_to_tls(session, tls.channel_binding)
    received = b""
    try:
        while len(received) < auth.ACCEPTANCE_BYTES:
            received += tls.decrypted(_receive_record(connection))
    except OSError as error:
        if tls.problem:
            raise PlanError(certificate_rejected(rank, 0, tls.problem)) from error
        return None
    if not hmac.compare_digest(received, auth.acceptance(session)):
        raise ConnectionLostError(
            "a third party between this process and the server there decrypts the connection"
        )
    return Connection(connection, MacPair.derive(session, is_client=True), tls)


def _await_close(connection: socket.socket) -> None:
    """Waits until rank 0 has read the alert: closing a socket with unread input would discard it (RST)."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(_CHUNK):
            pass


def _receive_record(connection: socket.socket) -> bytes:
    """The next TLS record, and no byte after it: the rest belongs to the `MessageReader`."""
    header = _receive_exactly(connection, _RECORD_HEADER)
    return header + _receive_exactly(connection, int.from_bytes(header[-2:], "big"))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError
        received += part
    return received
