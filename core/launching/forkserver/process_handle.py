"""Arguments of a new rank process, and the handle to a started one."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isotrain.core.system.interpreter_start import command_line
from isotrain.core.system.process import exit_code

_MAIN = "isotrain.core.worker.worker:main"


@dataclass(frozen=True)
class ProcessArgs:
    """Arguments of a new rank process.

    Attributes:
        variables: Complete environment.
        streams: Descriptors of standard input, output and error.
        inherited: Descriptors of the event pipe, the status page and the file with the job's arrays.
    """

    variables: Mapping[str, str]
    streams: tuple[int, int, int]
    inherited: tuple[int, int, int]


class ProcessHandle(Protocol):
    """A started process. It keeps its process id until `release`, also after it has ended."""

    @property
    def pid(self) -> int:
        """Process id, which is also its session id and process group id."""

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative if a signal ended it."""

    def release(self) -> None:
        """Reaps the process, once it has ended."""


class SpawnedProcess:
    """A rank process with a fresh interpreter, a child of this process; a `ProcessHandle`.

    Attributes:
        pid: Process id.
    """

    def __init__(self, arguments: ProcessArgs) -> None:
        """Starts the process.

        Raises:
            OSError: It cannot be started.
        """
        stdin, stdout, stderr = arguments.streams
        self._process = subprocess.Popen(
            command_line(_MAIN, *arguments.inherited),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=arguments.variables,
            pass_fds=arguments.inherited,
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative if a signal ended it."""
        return exit_code(self._process)

    def release(self) -> None:
        """Waits for its end and reaps it."""
        self._process.wait()
