"""Message authentication codes (MACs) with a counter: messages cannot be changed, dropped or repeated."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

MAC_BYTES = 32
Bytes = bytes | bytearray | memoryview
_CLIENT, _SERVER = b"client", b"server"


class Mac:
    """The MACs of one direction of a connection, message by message."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def compute(self, parts: Iterable[Bytes]) -> bytes:
        """The MAC of the next message: HMAC-SHA256 of its number and its bytes."""
        mac = hmac.new(self._key, self._count.to_bytes(8, "big"), "sha256")
        for part in parts:
            mac.update(part)
        self._count += 1
        return mac.digest()

    def verify(self, received: Bytes, parts: Iterable[Bytes]) -> bool:
        """Whether the received MAC is that of the next message."""
        return hmac.compare_digest(self.compute(parts), received)


@dataclass(frozen=True)
class MacPair:
    """The MACs of both directions, as one end uses them.

    Attributes:
        sending: MACs of the messages that this end sends.
        receiving: MACs of the messages that it receives.
    """

    sending: Mac
    receiving: Mac

    @classmethod
    def derive(cls, session: bytes, *, is_client: bool) -> MacPair:
        """Derives one key per direction from the session key."""
        roles = (_CLIENT, _SERVER) if is_client else (_SERVER, _CLIENT)
        sending, receiving = (Mac(hmac.digest(session, role, "sha256")) for role in roles)
        return cls(sending, receiving)
