"""Whether processes are alive, and that tests leave none behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from isotrain.core.launching.forkserver.pool import FORK_SERVERS


@contextlib.contextmanager
def no_leftover_processes() -> Iterator[None]:
    """Checks that the body leaves no child of this process behind, and none that a rank started."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [each for each in left if each.pid not in FORK_SERVERS.pids()]


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that ended and was not waited for is not alive."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
