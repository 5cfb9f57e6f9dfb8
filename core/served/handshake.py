"""How a caller and the coordinator of a served run prove to each other that they have the run's key.

The coordinator greets each caller with a challenge. The caller answers with its rank, a challenge of its
own and a proof; whoever cannot is told nothing more. Then the coordinator confirms that it has the key too.
A proof is the HMAC-SHA256 of all that was said before: the key itself never travels, and what was overheard
proves nothing later. Every message has a fixed length, so nobody can announce a long one.
"""

from __future__ import annotations

import hmac
import secrets
import struct

_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_OPENING = b"isotrain served run 1\n"
"""With it an answer begins; most who call by mistake are known by their first byte."""
_RANK = struct.Struct("!I")

GREETING_BYTES = _CHALLENGE_BYTES
ANSWER_BYTES = len(_OPENING) + _RANK.size + _CHALLENGE_BYTES + _PROOF_BYTES
CONFIRMATION_BYTES = _PROOF_BYTES


def greet() -> bytes:
    """What the coordinator says first, to each caller something else."""
    return secrets.token_bytes(_CHALLENGE_BYTES)


def answer_to(greeting: bytes, key: bytes, rank: int) -> bytes:
    """What the caller of this rank answers."""
    claim = _OPENING + _RANK.pack(rank) + secrets.token_bytes(_CHALLENGE_BYTES)
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


def confirm(greeting: bytes, answer: bytes, key: bytes) -> bytes:
    """What the coordinator says last, to a caller that has the key."""
    return _proof(key, b"coordinator", greeting + answer)


def is_confirmed(confirmation: bytes, greeting: bytes, answer: bytes, key: bytes) -> bool:
    """Whether the coordinator has the key."""
    return hmac.compare_digest(confirmation, confirm(greeting, answer, key))


def session(greeting: bytes, answer: bytes, key: bytes) -> bytes:
    """What from now on only these two know, of this connection alone."""
    return _proof(key, b"session", greeting + answer)


def _proof(key: bytes, role: bytes, said: bytes) -> bytes:
    """Another one for each side, so that neither can give the other's back."""
    return hmac.digest(key, role + b"\n" + said, "sha256")
