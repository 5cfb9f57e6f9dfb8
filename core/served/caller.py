"""Somebody at a door who has not proved yet that it belongs there."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from isotrain.core.served import handshake
from isotrain.core.served.seal import Seals
from isotrain.core.served.terms import Terms, apart, turned_down
from isotrain.core.served.wire import Wire

if TYPE_CHECKING:
    from isotrain.core.served.tls import TlsEnd

_CHUNK = 1 << 16


class Refused(Exception):
    """It is gone, or has proved that it does not belong here."""


class Caller:
    """Hears what somebody says, a part after the other, and never waits.

    Attributes:
        connection: To it.
        deadline: When it must be in (`time.monotonic`).
        rank: Of it, once it has proved that.
        estranged: Why the two cannot talk, though it is one of this run's processes; empty: nothing is wrong.
    """

    def __init__(
        self, connection: socket.socket, deadline: float, key: bytes, terms: Terms | None
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
        self._terms = terms or Terms()
        self._greeting = handshake.greet()
        self._heard = b""
        self.rank = 0
        self.estranged = ""
        self._tls: TlsEnd | None = None
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # gone: noticed when it is heard
            connection.send(self._greeting)

    def hear(self) -> tuple[int, Wire] | None:
        """Takes what has come.

        Returns:
            Its rank, and the connection; None while something is missing.

        Raises:
            Refused: It is gone, or does not belong here.
        """
        try:
            if self.estranged:
                self._see_off()
                return None
            if self._tls is None:
                part = self.connection.recv(handshake.ANSWER_BYTES - len(self._heard))
                return self._prove(part)
            return self._encrypt(self._tls, self.connection.recv(_CHUNK))
        except BlockingIOError:  # it only seemed that something had come
            return None
        except OSError as error:
            raise Refused from error

    def _prove(self, part: bytes) -> tuple[int, Wire] | None:
        self._heard += part
        if not part or not handshake.may_become_answer(self._heard):
            raise Refused
        if len(self._heard) < handshake.ANSWER_BYTES:
            return None
        rank = handshake.proven_rank(self._greeting, self._heard, self._key)
        if rank is None:
            raise Refused
        self.rank = rank
        self.estranged = apart(rank, handshake.terms_of(self._heard), self._terms)
        self._say(handshake.confirm(self._greeting, self._heard, self._key, self._terms))
        if self.estranged:
            return None
        if self._terms.tls is None:
            return self._let_in(self._session)
        self._tls = self._terms.tls.begin(is_caller=False)
        return None

    def _encrypt(self, tls: TlsEnd, part: bytes) -> tuple[int, Wire] | None:
        if not part:
            raise Refused
        answer = tls.shake_hands(part)
        self.estranged = turned_down(0, self.rank, tls.problem) if tls.problem else ""
        self._say(answer)
        if not tls.is_ready:
            return None
        session = handshake.bound(self._session, tls.binding)
        self._say(b"".join(tls.encrypted(handshake.welcome(session))))
        return self._let_in(session)

    def _say(self, text: bytes) -> None:
        """Says it; to one that cannot be talked with as the last word.

        Raises:
            Refused: It takes nothing in.
        """
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self.connection.send(text)
        if sent < len(text):
            raise Refused
        if self.estranged:
            self.connection.shutdown(socket.SHUT_WR)

    def _see_off(self) -> None:
        """Waits until it hangs up: what is closed with something unread takes the last word back."""
        if not self.connection.recv(_CHUNK):
            raise Refused

    @property
    def _session(self) -> bytes:
        """What only both ends know of the connection, once its answer was right."""
        return handshake.session(self._greeting, self._heard, self._key)

    def _let_in(self, session: bytes) -> tuple[int, Wire]:
        self.connection.setblocking(True)
        seals = Seals.made(session, is_caller=False) if self._seals else None
        return self.rank, Wire(self.connection, seals, self._tls)
