"""Cache of fork servers: they live on between the runs of this program, and end with it."""

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
from isotrain.core.system.interpreter_start import is_in_prefix

_RETRY_SECONDS = 60.0
"""Time in which no fork server is started after one like it failed to import: failing may take long."""
_IGNORED_VARIABLES = frozenset(
    ("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "ISOTRAIN_START")
)
"""Variables that no import reads. Shells and test runners change most of them; planning reads the last."""


_Key = tuple[Hashable, frozenset[str], Hashable]
"""Scope (see `ForkServerPool.only_new`), imported modules, and environment (see `_environment_key`)."""


class ForkServerPool:
    """LRU cache of fork servers, one for each set of imports and environment; started on first use.

    Attributes:
        capacity: Number of fork servers kept: each has a framework in memory. The least recently used is
            retired.
        answer_seconds: Limit for new fork servers to accept a request and to reply.
    """

    def __init__(self, capacity: int = 4, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.capacity = capacity
        self.answer_seconds = answer_seconds
        self._lock = threading.RLock()
        self._fork_servers: dict[_Key, ForkServer] = {}
        self._failures: dict[_Key, tuple[str, float]] = {}
        """Reason why a fork server failed, and the `time.monotonic` before which none like it is started."""
        self._is_closed = False
        self._scope: Hashable = None
        """Part of the key; changed by `only_new`."""

    def get(self, imports: Sequence[str], variables: Mapping[str, str]) -> ForkServer:
        """Returns a fork server with these imports and environment; starts it if there is none.

        Args:
            imports: Modules to import; they may still be importing when this returns.
            variables: The complete environment of the imports.

        Raises:
            ForkServerError: None can be started.
        """
        key = (self._scope, frozenset(imports), _environment_key(variables))
        existing = self._fork_servers.get(key)
        if existing is not None and not existing.is_current():  # without the lock: it may be slow
            self.drop(existing)
        with self._lock:
            self._require_startable(key)
            fork_server = self._fork_servers.pop(key, None)
            fork_server = fork_server or _start(imports, variables, self.answer_seconds)
            self._fork_servers[key] = fork_server
            oldest_keys = list(self._fork_servers)[: -self.capacity]
            surplus = [self._fork_servers.pop(oldest) for oldest in oldest_keys]
        for each in surplus:
            each.retire()
        return fork_server

    def _require_startable(self, key: _Key) -> None:
        if self._is_closed:
            raise ForkServerError("this program is ending")
        reason, until = self._failures.get(key, ("", 0.0))
        if time.monotonic() < until:
            raise ForkServerError(reason)

    def drop(self, fork_server: ForkServer, reason: str | None = None) -> None:
        """Removes a fork server from the cache and retires it.

        Args:
            fork_server: A broken or outdated fork server.
            reason: Reason why it failed, if a new one would fail alike. If it could not even import, none
                like it is started for a while.
        """
        with self._lock:
            for key, cached in list(self._fork_servers.items()):
                if cached is fork_server:
                    del self._fork_servers[key]
                    if reason is not None and not fork_server.is_ready:
                        self._failures[key] = reason, time.monotonic() + _RETRY_SECONDS
        fork_server.retire()

    @contextlib.contextmanager
    def only_new(self) -> Iterator[None]:
        """Context in which runs start new fork servers, retired at its end. Cached ones are kept."""
        outer_scope, self._scope = self._scope, object()
        scope = self._scope
        try:
            yield
        finally:
            self._scope = outer_scope
            with self._lock:
                keys = [key for key in self._fork_servers if key[0] is scope]
                ended = [self._fork_servers.pop(key) for key in keys]
            for fork_server in ended:
                fork_server.retire()

    def pids(self) -> list[int]:
        """Process ids of the cached fork servers."""
        with self._lock:
            return [fork_server.pid for fork_server in self._fork_servers.values()]

    def close(self) -> None:
        """Ends all fork servers, and starts no more."""
        with self._lock:
            self._is_closed = True
            for fork_server in self._fork_servers.values():
                fork_server.end()

    def forget(self) -> None:
        """Empties the cache in a process forked from this program, which does not own the fork servers."""
        for fork_server in self._fork_servers.values():
            fork_server.forget()
        self._fork_servers = {}
        self._lock = (
            threading.RLock()
        )  # a thread that does not exist here may have held the other one


def _start(
    imports: Sequence[str], variables: Mapping[str, str], answer_seconds: float
) -> ForkServer:
    try:
        return ForkServer(imports, variables, answer_seconds)
    except OSError as error:
        raise ForkServerError(str(error)) from error


def _environment_key(variables: Mapping[str, str]) -> Hashable:
    """Everything that a fresh process would inherit or find installed, and that could alter its imports."""
    limits = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIM")]
    return (
        sys.executable,
        frozenset((k, v) for k, v in variables.items() if k not in _IGNORED_VARIABLES),
        frozenset(os.sched_getaffinity(0)),
        tuple(resource.getrlimit(each) for each in limits if each >= 0),
        os.getpriority(os.PRIO_PROCESS, 0),
        _umask(),
        tuple(map(_modified_at, filter(is_in_prefix, sys.path))),
    )


def _umask() -> str:
    """The umask, read without setting it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line for line in lines if line.startswith("Umask")), "")


def _modified_at(folder: str) -> tuple[str, int]:
    """A folder and its mtime in ns: when something was last installed into it or removed from it."""
    try:
        return folder, os.stat(folder).st_mtime_ns
    except OSError:
        return folder, 0


FORK_SERVERS = ForkServerPool()
atexit.register(FORK_SERVERS.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FORK_SERVERS.forget)
