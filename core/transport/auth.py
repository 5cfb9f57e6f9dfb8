"""HMAC challenge-response: both ends of a connection prove that they have the run's key.

The coordinator greets each caller with a challenge. The caller answers with its rank, its terms (whether it
encrypts), a challenge of its own and a proof; whoever cannot is told nothing more. Then the coordinator tells
its terms, and confirms that it has the key too. A proof is the HMAC-SHA256 of all that was said before: the
key itself never travels, and what was overheard proves nothing later. Every message has a fixed length, so
nobody can announce a long one.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from isotrain.core.transport.encryption import OFFER_BYTES, EncryptionOffer

_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_OPENING = b"isotrain parameter-server run 1\n"
"""With it an answer begins; most who call by mistake are known by their first byte."""
_PLAIN = EncryptionOffer()
_RANK = struct.Struct("!I")

GREETING_BYTES = _CHALLENGE_BYTES
ANSWER_BYTES = len(_OPENING) + _RANK.size + OFFER_BYTES + _CHALLENGE_BYTES + _PROOF_BYTES
CONFIRMATION_BYTES = OFFER_BYTES + _PROOF_BYTES
ACCEPTANCE_BYTES = _PROOF_BYTES


def greet() -> bytes:
    """What the coordinator says first, to each caller something else."""
    return secrets.token_bytes(_CHALLENGE_BYTES)


def answer_to(greeting: bytes, key: bytes, rank: int, terms: EncryptionOffer = _PLAIN) -> bytes:
    """What the caller of this rank answers."""
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    claim = _OPENING + _RANK.pack(rank) + terms.to_bytes() + challenge
    return claim + _proof(key, b"caller", greeting + claim)


def may_become_answer(begun: bytes) -> bool:
    """Whether an answer can begin like this."""
    return _OPENING.startswith(begun[: len(_OPENING)])


def proven_rank(greeting: bytes, answer: bytes, key: bytes) -> int | None:
    """The rank of the caller that gave a whole answer; None unless it has the key."""
    claim, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"caller", greeting + claim)):
        return None
    rank: int = _RANK.unpack_from(claim, len(_OPENING))[0]
    return rank


def offer_of(answer: bytes) -> EncryptionOffer:
    """What a caller that has proved its rank has said of encrypting."""
    start = len(_OPENING) + _RANK.size
    return EncryptionOffer.from_bytes(answer[start : start + OFFER_BYTES])


def confirm(greeting: bytes, answer: bytes, key: bytes, terms: EncryptionOffer = _PLAIN) -> bytes:
    """What the coordinator says last, to a caller that has the key."""
    told = terms.to_bytes()
    return told + _proof(key, b"coordinator", greeting + answer + told)


def confirmed(
    confirmation: bytes, greeting: bytes, answer: bytes, key: bytes
) -> EncryptionOffer | None:
    """The coordinator's terms; None unless it has the key."""
    told, proof = confirmation[:OFFER_BYTES], confirmation[OFFER_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"coordinator", greeting + answer + told)):
        return None
    return EncryptionOffer.from_bytes(told)


def session(greeting: bytes, answer: bytes, key: bytes) -> bytes:
    """What from now on only these two know, of this connection alone."""
    return _proof(key, b"session", greeting + answer)


def bound(session: bytes, binding: bytes) -> bytes:
    """The same of an encrypted connection: somebody in between has two, and another one of each."""
    return _proof(session, b"encrypted", binding)


def acceptance(session: bytes) -> bytes:
    """What the coordinator says first, once it has accepted the certificate of a caller that encrypts."""
    return _proof(session, b"welcome", b"")


def _proof(key: bytes, role: bytes, said: bytes) -> bytes:
    """Another one for each side, so that neither can give the other's back."""
    return hmac.digest(key, role + b"\n" + said, "sha256")
