"""Imported by fork servers of JAX, so that every rank keeps what it has compiled for its next session.

In JAX rank 0 alone does, and finds it again: what others compile is for their own devices, not the same.
Sessions that follow each other ask for much that those before them had.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from jax._src import compiler, distributed

_write = compiler._cache_write


def _by_each(*arguments: Any) -> None:
    with mock.patch.object(distributed.global_state, "process_id", 0):
        _write(*arguments)


compiler._cache_write = _by_each
