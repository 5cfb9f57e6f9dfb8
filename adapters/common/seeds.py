"""Random seeds of a replica in a step."""

from __future__ import annotations

_REPLICA_STRIDE = 0x9E3779B1
"""Odd, so that adding multiples of it to a 32-bit seed keeps replicas' seeds distinct."""
SEED_MASK = 0x7FFFFFFF
"""The bits of a seed that all generators accept."""
_STEP_STRIDE = 0x85EBCA6B
"""Odd too, and no small multiple of the other, so that steps' seeds are distinct."""


def seed_offset(replica: int, step: int = 0) -> int:
    """Offset of the seeds of random layers in a step from those of replica 0 in step 0."""
    return replica * _REPLICA_STRIDE + step * _STEP_STRIDE
