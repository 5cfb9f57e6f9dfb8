"""Which random numbers a replica draws in a step."""

from __future__ import annotations

_REPLICA_STRIDE = 0x9E3779B1
"""Odd, so that adding multiples of it to a 32-bit seed keeps replicas' seeds apart."""
SEED_MASK = 0x7FFFFFFF
"""The bits of a seed that all generators take."""
_STEP_STRIDE = 0x85EBCA6B
"""Odd too, and no small multiple of the other: it keeps steps apart."""


def seed_offset(replica: int, step: int = 0) -> int:
    """By what seeds of random layers differ in a step from those of replica 0 at the start."""
    return replica * _REPLICA_STRIDE + step * _STEP_STRIDE
