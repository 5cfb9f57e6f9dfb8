"""Whether the two ends of a connection encrypt it, which they tell each other before."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.transport.tls import Tls

TLS_VARIABLE = "ISOTRAIN_TLS"
"""The folder with the files by which a joined run's processes encrypt what they tell each other."""
_TEXT_BYTES = 511
_TERMS = struct.Struct(f"!B{_TEXT_BYTES}s")
_NONE, _TLS, _BROKEN = range(3)

OFFER_BYTES = _TERMS.size


@dataclass(frozen=True)
class EncryptionOffer:
    """What one end was told, and has told.

    Attributes:
        folder: With the files to encrypt by, on its host; empty: it does not.
        problem: Why it cannot; empty: it can.
        tls: What it encrypts with; None for the other end, and where it does not or cannot.
    """

    folder: str = ""
    problem: str = ""
    tls: Tls | None = field(default=None, compare=False)

    @classmethod
    def of(cls, folder: str) -> EncryptionOffer:
        """Those of this process.

        Args:
            folder: With its files; empty: it does not encrypt.
        """
        folder = folder.strip()
        if not folder:
            return cls()
        from isotrain.core.transport.tls import Tls

        try:
            return cls(folder, tls=Tls(Path(folder).expanduser()))
        except (PlanError, RuntimeError) as error:  # or there is no home
            return cls(folder, f"{TLS_VARIABLE}: {error}")

    @classmethod
    def from_bytes(cls, said: bytes) -> EncryptionOffer:
        """Those of the other end."""
        kind, text = _TERMS.unpack(said)
        words = text.rstrip(b"\0").decode("utf-8", "ignore")
        return cls(problem=words) if kind == _BROKEN else cls(words if kind == _TLS else "")

    def to_bytes(self) -> bytes:
        """What the other end is told: as many bytes whatever it is."""
        kind = _BROKEN if self.problem else _TLS if self.folder else _NONE
        text = (self.problem or self.folder).encode("utf-8", "backslashreplace")
        if len(text) > _TEXT_BYTES:
            text = text[: _TEXT_BYTES - 3] + b"..."
        return _TERMS.pack(kind, text)

    def facts(self) -> dict[str, str | None]:
        """What there is to say of it, as plain values."""
        until = None if self.tls is None else self.tls.until
        return {"folder": self.folder or None, "problem": self.problem or None, "until": until}

    def require_available(self) -> None:
        """Raises:
        PlanError: This process was told to encrypt, and cannot.
        """
        if self.problem:
            raise PlanError(self.problem)

    def __str__(self) -> str:
        if self.folder:
            return f"encrypts ({TLS_VARIABLE}={self.folder})"
        return f"does not encrypt ({TLS_VARIABLE} is not set there)"


def mismatch(rank: int, caller: EncryptionOffer, door: EncryptionOffer) -> str:
    """Why rank 0 and a caller cannot talk, the same text at both ends; empty: they can."""
    broken = [(who, each.problem) for who, each in ((0, door), (rank, caller)) if each.problem]
    if broken:
        return "\n".join(f"rank {who} cannot encrypt: {problem}" for who, problem in broken)
    if bool(caller.folder) == bool(door.folder):
        return ""
    return (
        f"rank 0 {door}, and rank {rank} {caller}. Set {TLS_VARIABLE} for all processes or for none; an"
        f" engine may hand on only the variables that it is told to (mpirun -x {TLS_VARIABLE})."
    )


def certificate_rejected(own: int, other: int, problem: str) -> str:
    """What to say where both ends encrypt, and one does not trust the other."""
    return (
        f"rank {own} cannot encrypt its connection to rank {other}: {problem}. Both have {TLS_VARIABLE} set."
        " Give all hosts the same ca.crt, a tls.crt that it has signed and that has not expired, and the same"
        " time."
    )
