"""Preloaded by fork servers of JAX, so that every rank caches compiled programs for its next session.

In JAX only rank 0 writes the cache, because other ranks compile for their own devices. Consecutive sessions
compile much that earlier ones compiled.
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
