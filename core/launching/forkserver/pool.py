"""The templates of this program: they live on between its runs, and end with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

from isotrain.core.launching.forkserver.client import ANSWER_SECONDS, ForkServer, ForkServerError
from isotrain.core.system.interpreter import is_of_interpreter

_REFUSED_SECONDS = 60.0
"""One that could not import is not tried again at once: it may have taken long to fail."""
_READ_BY_NO_IMPORT = frozenset(
    ("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "ISOTRAIN_START")
)
"""Variables that shells and test runners change all the time, and one that plans read."""


_Key = tuple[Hashable, frozenset[str], Hashable]
"""The occasion, what is imported, and the circumstances."""


class ForkServerPool:
    """Starts templates when they are first needed, one for each set of circumstances.

    Attributes:
        most: How many are kept: each has a framework in memory. The one that was not used for longest goes.
        answer_seconds: In which those that are started from now on take a request and answer it.
    """

    def __init__(self, most: int = 4, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.most = most
        self.answer_seconds = answer_seconds
        self._lock = threading.RLock()
        self._found: dict[_Key, ForkServer] = {}
        self._refused: dict[_Key, tuple[str, float]] = {}
        """Why there can be none, and until when nobody tries again (`time.monotonic`)."""
        self._is_closed = False
        self._occasion: Hashable = None
        """For what runs are started: part of what tells templates apart."""

    def get(self, imports: Sequence[str], variables: Mapping[str, str]) -> ForkServer:
        """Gives a template, started just now if there is none; it may still import.

        Args:
            imports: What it imports.
            variables: All variables that it imports under.

        Raises:
            ForkServerError: There can be none.
        """
        key = (self._occasion, frozenset(imports), _circumstances(variables))
        former = self._found.get(key)
        if former is not None and not former.is_current():  # without the lock: it may be slow
            self.drop(former)
        with self._lock:
            self._refuse(key)
            given = self._found.pop(key, None) or _started(imports, variables, self.answer_seconds)
            self._found[key] = given
            surplus = [self._found.pop(each) for each in list(self._found)[: -self.most]]
        for each in surplus:
            each.retire()
        return given

    def _refuse(self, key: _Key) -> None:
        if self._is_closed:
            raise ForkServerError("this program is ending")
        reason, until = self._refused.get(key, ("", 0.0))
        if time.monotonic() < until:
            raise ForkServerError(reason)

    def drop(self, template: ForkServer, reason: str | None = None) -> None:
        """Keeps a template from being used again.

        Args:
            template: One that is broken, or no longer what a new one would be.
            reason: Why one like it would be broken too, if it could not even import: for a while,
                none is started.
        """
        with self._lock:
            for key, found in list(self._found.items()):
                if found is template:
                    del self._found[key]
                    if reason is not None and not template.is_ready:
                        self._refused[key] = reason, time.monotonic() + _REFUSED_SECONDS
        template.retire()

    @contextlib.contextmanager
    def only_new(self) -> Iterator[None]:
        """Has runs meanwhile start templates of their own, which end with it; the others are kept."""
        before, self._occasion = self._occasion, object()
        own = self._occasion
        try:
            yield
        finally:
            self._occasion = before
            with self._lock:
                keys = [key for key in self._found if key[0] is own]
                ended = [self._found.pop(key) for key in keys]
            for template in ended:
                template.retire()

    def pids(self) -> list[int]:
        """Numbers of the templates that are kept."""
        with self._lock:
            return [template.pid for template in self._found.values()]

    def close(self) -> None:
        """Ends all of them, for good."""
        with self._lock:
            self._is_closed = True
            for template in self._found.values():
                template.end()

    def forget(self) -> None:
        """In a process that was forked from this program: they belong to the program alone."""
        for template in self._found.values():
            template.forget()
        self._found = {}
        self._lock = threading.RLock()  # a thread that is not here may have held the other


def _started(
    imports: Sequence[str], variables: Mapping[str, str], answer_seconds: float
) -> ForkServer:
    try:
        return ForkServer(imports, variables, answer_seconds)
    except OSError as error:
        raise ForkServerError(str(error)) from error


def _circumstances(variables: Mapping[str, str]) -> Hashable:
    """What a process that starts by itself would be given besides its run, or find installed."""
    limits = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIM")]
    return (
        sys.executable,
        frozenset((k, v) for k, v in variables.items() if k not in _READ_BY_NO_IMPORT),
        frozenset(os.sched_getaffinity(0)),
        tuple(resource.getrlimit(each) for each in limits if each >= 0),
        os.getpriority(os.PRIO_PROCESS, 0),
        _mask(),
        tuple(map(_changed, filter(is_of_interpreter, sys.path))),
    )


def _mask() -> str:
    """The permissions that new files are denied, read without setting them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line for line in lines if line.startswith("Umask")), "")


def _changed(folder: str) -> tuple[str, int]:
    """When something was last installed into, or removed from, a folder."""
    try:
        return folder, os.stat(folder).st_mtime_ns
    except OSError:
        return folder, 0


FORK_SERVERS = ForkServerPool()
atexit.register(FORK_SERVERS.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FORK_SERVERS.forget)
