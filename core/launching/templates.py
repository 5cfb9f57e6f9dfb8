"""The templates of this program: they live on between its runs, and end with it."""

from __future__ import annotations

import atexit
import os
import resource
import sys
import threading
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from isotrain.core.launching.template import Template, TemplateError

_MOST = 4
"""Each keeps a framework in memory; the one that was not used for longest goes first."""
_READ_BY_NO_IMPORT = frozenset(
    ("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES")
)
"""Variables that shells and test runners change all the time."""


class Templates:
    """Starts templates when they are first needed, one for each set of circumstances."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: dict[Hashable, Template] = {}
        self._refused: dict[Hashable, str] = {}
        self._is_closed = False

    def get(self, imports: Sequence[str], environment: Mapping[str, str]) -> Template:
        """Gives a template, started just now if there is none; it may still import.

        Args:
            imports: What it imports.
            environment: All variables that it imports under.

        Raises:
            TemplateError: There can be none.
        """
        key = (tuple(imports), _circumstances(environment))
        with self._lock:
            if self._is_closed:
                raise TemplateError("this program is ending")
            if key in self._refused:
                raise TemplateError(self._refused[key])
            template = self._found.pop(key, None)
            if template is not None and not template.is_current():
                template.retire()
                template = None
            self._found[key] = template or _started(imports, environment)
            while len(self._found) > _MOST:
                self._found.pop(next(iter(self._found))).retire()
            return self._found[key]

    def drop(self, template: Template, reason: str) -> None:
        """Keeps a broken template from being used again, and one like it from being started."""
        with self._lock:
            for key, found in list(self._found.items()):
                if found is template:
                    del self._found[key]
                    if not template.is_ready:
                        self._refused[key] = reason
            template.retire()

    def retire(self) -> None:
        """Has the next run start a new template; those that no run uses end now."""
        with self._lock:
            while self._found:
                self._found.popitem()[1].retire()

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


def _started(imports: Sequence[str], environment: Mapping[str, str]) -> Template:
    try:
        return Template(imports, environment)
    except OSError as error:
        raise TemplateError(str(error)) from error


def _circumstances(environment: Mapping[str, str]) -> Hashable:
    """What a process that starts by itself would be given besides its run, or find installed."""
    limits = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIM")]
    return (
        sys.executable,
        frozenset((k, v) for k, v in environment.items() if k not in _READ_BY_NO_IMPORT),
        frozenset(os.sched_getaffinity(0)),
        tuple(resource.getrlimit(each) for each in limits if each >= 0),
        os.getpriority(os.PRIO_PROCESS, 0),
        _mask(),
        tuple(map(_changed, filter(_is_of_environment, sys.path))),
    )


def _mask() -> str:
    """The permissions that new files are denied, read without setting them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line for line in lines if line.startswith("Umask")), "")


def _is_of_environment(folder: str) -> bool:
    return any(Path(folder).is_relative_to(root) for root in {sys.prefix, sys.base_prefix})


def _changed(folder: str) -> tuple[str, int]:
    """When something was last installed into, or removed from, a folder."""
    try:
        return folder, os.stat(folder).st_mtime_ns
    except OSError:
        return folder, 0


OF_THIS_PROGRAM = Templates()
atexit.register(OF_THIS_PROGRAM.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OF_THIS_PROGRAM.forget)
