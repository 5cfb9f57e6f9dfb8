"""Whether the two ends of a connection encrypt it: each end sends the other an encryption offer.

From Python 3.13 on, `ssl` has TLS-PSK (`SSLContext.set_psk_client_callback`). With the run's key as the
pre-shared key, it could replace the challenge-response of `auth`, the MACs of `message_auth` and this
negotiation: authentication, integrity and encryption then need no certificates.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.transport.tls import Tls

TLS_VARIABLE = "ISOTRAIN_TLS"
"""Environment variable: the folder with the TLS files of a run whose processes were started from outside."""
_TEXT_BYTES = 511
_OFFER = struct.Struct(f"!B{_TEXT_BYTES}s")
_NONE, _TLS, _BROKEN = range(3)

OFFER_BYTES = _OFFER.size


@dataclass(frozen=True)
class EncryptionOffer:
    """The encryption offer of one end of a connection.

    Attributes:
        folder: Folder with the TLS files, on its host; empty: it does not encrypt.
        problem: Reason why it cannot encrypt; empty: it can.
        tls: TLS contexts of this process; None for the other end, and without encryption.
    """

    folder: str = ""
    problem: str = ""
    tls: Tls | None = field(default=None, compare=False)

    @classmethod
    def from_folder(cls, folder: str) -> EncryptionOffer:
        """The offer of this process.

        Args:
            folder: Folder with the TLS files; empty: it does not encrypt.
        """
        folder = folder.strip()
        if not folder:
            return cls()
        from isotrain.core.transport.tls import Tls

        try:
            return cls(folder, tls=Tls(Path(folder).expanduser()))
        except (PlanError, RuntimeError) as error:  # RuntimeError: there is no home directory
            return cls(folder, f"{TLS_VARIABLE}: {error}")

    @classmethod
    def from_bytes(cls, encoded: bytes) -> EncryptionOffer:
        """Decodes the offer of the other end."""
        kind, padded = _OFFER.unpack(encoded)
        text = padded.rstrip(b"\0").decode("utf-8", "ignore")
        return cls(problem=text) if kind == _BROKEN else cls(text if kind == _TLS else "")

    def to_bytes(self) -> bytes:
        """Encodes the offer; always `OFFER_BYTES` bytes."""
        kind = _BROKEN if self.problem else _TLS if self.folder else _NONE
        text = (self.problem or self.folder).encode("utf-8", "backslashreplace")
        if len(text) > _TEXT_BYTES:
            text = text[: _TEXT_BYTES - 3] + b"..."
        return _OFFER.pack(kind, text)

    def facts(self) -> dict[str, str | None]:
        """The offer as JSON values: folder, problem, and the certificate's expiry date."""
        expiry = None if self.tls is None else self.tls.certificate_expiry
        return {"folder": self.folder or None, "problem": self.problem or None, "until": expiry}

    def require_available(self) -> None:
        """Raises:
        PlanError: This process has to encrypt, and cannot.
        """
        if self.problem:
            raise PlanError(self.problem)

    def __str__(self) -> str:
        if self.folder:
            return f"encrypts ({TLS_VARIABLE}={self.folder})"
        return f"does not encrypt ({TLS_VARIABLE} is not set there)"


def mismatch(rank: int, client: EncryptionOffer, server: EncryptionOffer) -> str:
    """Reason why rank 0 and a client cannot talk, the same text at both ends; empty: they can."""
    broken = [(who, offer.problem) for who, offer in ((0, server), (rank, client)) if offer.problem]
    if broken:
        return "\n".join(f"rank {who} cannot encrypt: {problem}" for who, problem in broken)
    if bool(client.folder) == bool(server.folder):
        return ""
    return (
        f"rank 0 {server}, and rank {rank} {client}. Set {TLS_VARIABLE} for all processes or for none; a"
        f" launcher may pass on only the variables that you name (mpirun -x {TLS_VARIABLE})."
    )


def certificate_rejected(rank: int, peer: int, problem: str) -> str:
    """Message for two ends that both encrypt, when one rejects the other's certificate."""
    return (
        f"rank {rank} cannot encrypt its connection to rank {peer}: {problem}. Both have {TLS_VARIABLE}"
        " set. Give all hosts the same ca.crt, a tls.crt that it has signed and that has not expired, and the"
        " same time."
    )
