"""Somebody at a door who has not proved yet that it belongs there."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from isotrain.core.served import handshake
from isotrain.core.served.seal import MacPair
from isotrain.core.served.terms import EncryptionOffer, mismatch, certificate_rejected
from isotrain.core.served.wire import Connection

if TYPE_CHECKING:
    from isotrain.core.served.tls import TlsEndpoint

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
        self._greeting = handshake.greet()
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
                part = self.connection.recv(handshake.ANSWER_BYTES - len(self._heard))
                return self._prove(part)
            return self._encrypt(self._tls, self.connection.recv(_CHUNK))
        except BlockingIOError:  # it only seemed that something had come
            return None
        except OSError as error:
            raise ConnectionRejectedError from error

    def _prove(self, part: bytes) -> tuple[int, Connection] | None:
        self._heard += part
        if not part or not handshake.may_become_answer(self._heard):
            raise ConnectionRejectedError
        if len(self._heard) < handshake.ANSWER_BYTES:
            return None
        rank = handshake.proven_rank(self._greeting, self._heard, self._key)
        if rank is None:
            raise ConnectionRejectedError
        self.rank = rank
        self.rejected = mismatch(rank, handshake.offer_of(self._heard), self._terms)
        self._say(handshake.confirm(self._greeting, self._heard, self._key, self._terms))
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
        session = handshake.bound(self._session, tls.binding)
        self._say(b"".join(tls.encrypted(handshake.acceptance(session))))
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
        return handshake.session(self._greeting, self._heard, self._key)

    def _let_in(self, session: bytes) -> tuple[int, Connection]:
        self.connection.setblocking(True)
        seals = MacPair.derive(session, is_caller=False) if self._seals else None
        return self.rank, Connection(self.connection, seals, self._tls)
