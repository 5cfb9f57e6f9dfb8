"""Seals on the messages of a connection: nobody in between can change, drop, repeat or add one unnoticed."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

MAC_BYTES = 32
Bytes = bytes | bytearray | memoryview
_CALLER, _COORDINATOR = b"caller", b"coordinator"


class Mac:
    """Makes the seals of one direction, a message after the other."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def of(self, parts: Iterable[Bytes]) -> bytes:
        """The seal of the next message: an HMAC-SHA256 of its number and its bytes."""
        made = hmac.new(self._key, self._count.to_bytes(8, "big"), "sha256")
        for part in parts:
            made.update(part)
        self._count += 1
        return made.digest()

    def verify(self, found: Bytes, parts: Iterable[Bytes]) -> bool:
        """Whether the next message has its seal."""
        return hmac.compare_digest(self.of(parts), found)


@dataclass(frozen=True)
class MacPair:
    """Those of both directions, as one end needs them.

    Attributes:
        sending: Of what it sends.
        receiving: Of what it receives.
    """

    sending: Mac
    receiving: Mac

    @classmethod
    def derive(cls, session: bytes, *, is_caller: bool) -> MacPair:
        """Makes them of what only both ends know of this connection."""
        roles = (_CALLER, _COORDINATOR) if is_caller else (_COORDINATOR, _CALLER)
        sending, receiving = (Mac(hmac.digest(session, role, "sha256")) for role in roles)
        return cls(sending, receiving)
