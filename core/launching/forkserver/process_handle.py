"""What a new process of a run is given, and how whoever started it knows it afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from isotrain.core.system.interpreter import command_line
from isotrain.core.system.process import exit_code

_MAIN = "isotrain.core.worker.worker:main"


@dataclass(frozen=True)
class ProcessArgs:
    """What a new process of a run is given.

    Attributes:
        variables: All of its variables.
        streams: Descriptors of its standard input, output and error.
        inherited: Descriptors for its events, its status page and the job's arrays.
    """

    variables: Mapping[str, str]
    streams: tuple[int, int, int]
    inherited: tuple[int, int, int]


class ProcessHandle(Protocol):
    """A process that was started; until `release` it keeps its number, also when it has ended."""

    @property
    def pid(self) -> int:
        """Its number, and that of its session and process group."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""

    def release(self) -> None:
        """Lets the system forget it, once it has ended."""


Spawn = Callable[[ProcessArgs], ProcessHandle]
"""A way to start a process."""


class SpawnedProcess:
    """A process that has started by itself, as a child of this one.

    Attributes:
        pid: Its number.
    """

    def __init__(self, beginning: ProcessArgs) -> None:
        """Starts it."""
        stdin, stdout, stderr = beginning.streams
        self._process = subprocess.Popen(
            command_line(_MAIN, *beginning.inherited),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=beginning.variables,
            pass_fds=beginning.inherited,
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return exit_code(self._process)

    def release(self) -> None:
        """Waits for its end."""
        self._process.wait()
