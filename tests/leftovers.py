"""That tests leave no process behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from isotrain.core.launching.templates import OF_THIS_PROGRAM


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """No process may be left behind: no child of this one, and none that a rank started."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [each for each in left if each.pid not in OF_THIS_PROGRAM.pids()]
