"""HMAC challenge-response: client and server each prove that they have the run's key.

The server (rank 0, or the coordinator of a parameter-server run) sends each client a random challenge. The
client answers with its rank, its encryption offer, a challenge of its own and a proof; a client without the
key gets no reply. Then the server sends its own encryption offer and its own proof. A proof is the
HMAC-SHA256 of all bytes sent before: the key itself never travels, and a recorded proof is worthless later.
Every message has a fixed length, so nobody can announce a long one.

Compare `deliver_challenge` and `answer_challenge` of `multiprocessing.connection`, the same protocol in the
standard library. Its `Listener.accept` blocks until one client has answered; here no client delays another
one, and both the rank and the encryption offer are authenticated.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from isotrain.core.transport.encryption import OFFER_BYTES, EncryptionOffer

CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_MAGIC = b"isotrain handshake 1\n"
"""First bytes of every answer; most clients of another protocol differ in their first byte."""
_NO_ENCRYPTION = EncryptionOffer()
_RANK = struct.Struct("!I")

ANSWER_BYTES = len(_MAGIC) + _RANK.size + OFFER_BYTES + CHALLENGE_BYTES + _PROOF_BYTES
CONFIRMATION_BYTES = OFFER_BYTES + _PROOF_BYTES
ACCEPTANCE_BYTES = _PROOF_BYTES


def new_challenge() -> bytes:
    """The server's challenge, the first message: random bytes, new for each client."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def answer_challenge(
    challenge: bytes, key: bytes, rank: int, offer: EncryptionOffer = _NO_ENCRYPTION
) -> bytes:
    """The client's answer: its rank, encryption offer, own challenge, and proof of the key."""
    own_challenge = secrets.token_bytes(CHALLENGE_BYTES)
    claim = _MAGIC + _RANK.pack(rank) + offer.to_bytes() + own_challenge
    return claim + _proof(key, b"client", challenge + claim)


def is_answer_prefix(received: bytes) -> bool:
    """Whether an answer can begin with these bytes."""
    return _MAGIC.startswith(received[: len(_MAGIC)])


def verify_answer(challenge: bytes, answer: bytes, key: bytes) -> int | None:
    """The rank of the client that sent this complete answer; None if its proof is wrong."""
    claim, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"client", challenge + claim)):
        return None
    rank: int = _RANK.unpack_from(claim, len(_MAGIC))[0]
    return rank


def offer_in_answer(answer: bytes) -> EncryptionOffer:
    """The client's encryption offer, from a verified answer."""
    start = len(_MAGIC) + _RANK.size
    return EncryptionOffer.from_bytes(answer[start : start + OFFER_BYTES])


def confirm_answer(
    challenge: bytes, answer: bytes, key: bytes, offer: EncryptionOffer = _NO_ENCRYPTION
) -> bytes:
    """The server's last message, to a verified client: its encryption offer and proof of the key."""
    encoded_offer = offer.to_bytes()
    return encoded_offer + _proof(key, b"server", challenge + answer + encoded_offer)


def verify_confirmation(
    confirmation: bytes, challenge: bytes, answer: bytes, key: bytes
) -> EncryptionOffer | None:
    """The server's encryption offer; None if its proof is wrong."""
    encoded_offer, proof = confirmation[:OFFER_BYTES], confirmation[OFFER_BYTES:]
    expected = _proof(key, b"server", challenge + answer + encoded_offer)
    if not hmac.compare_digest(proof, expected):
        return None
    return EncryptionOffer.from_bytes(encoded_offer)


def session_key(challenge: bytes, answer: bytes, key: bytes) -> bytes:
    """A secret of this connection, which only its two ends can compute."""
    return _proof(key, b"session", challenge + answer)


def bind_to_tls(session: bytes, channel_binding: bytes) -> bytes:
    """Session key of an encrypted connection: an attacker in between has two TLS connections, and fails."""
    return _proof(session, b"encrypted", channel_binding)


def acceptance(session: bytes) -> bytes:
    """First message of the server inside TLS: it has accepted the client's certificate."""
    return _proof(session, b"accepted", b"")


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    """HMAC-SHA256 of the bytes so far; differs by role, so that neither end can replay the other's."""
    return hmac.digest(key, role + b"\n" + transcript, "sha256")
