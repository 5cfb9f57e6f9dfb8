"""What an engine was started with: its commands, what they print, and their end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from isotrain.core.contracts.launcher import Submission
from isotrain.core.errors import PlanError
from isotrain.core.launching.processes.orphan_guard import OrphanGuard
from isotrain.core.system.process import exit_code, wait_for_end
from isotrain.core.system.standard_streams import enlarge_pipe

END_SECONDS = 15.0
"""What an engine has to end its ranks before it is ended itself."""

_LOOK_SECONDS = 0.2


class SchedulerProcess:
    """An engine's commands while they run; use it in a `with` statement, after which none of them runs."""

    def __init__(self, submission: Submission, log: Path, variables: Mapping[str, str]) -> None:
        """Starts them.

        Args:
            submission: Has the commands.
            log: Receives what they print to standard error.
            variables: All that they find set.

        Raises:
            PlanError: A command cannot be started.
        """
        self._last = submission.cleanup_commands
        self._deadline: float | None = None
        self._lines: queue.SimpleQueue[str | subprocess.Popen[str]] = queue.SimpleQueue()
        """What the commands print, and each of them at the end of that."""
        self._processes: list[subprocess.Popen[str]] = []
        self._guard = OrphanGuard(END_SECONDS, submission.cleanup_commands)
        try:
            for command in submission.commands:
                self._start(command, submission.stdin, log, variables)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> SchedulerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._guard.close()
        for process in self._processes:  # not earlier: their numbers must remain theirs
            process.wait()

    def lines(self) -> Iterator[str]:
        """What the commands print, line by line, until all of them have ended or should have."""
        talking = len(self._processes)
        while talking and not self._is_late():
            if any(map(exit_code, self._processes)):  # the others may wait for it
                self.expect_end()
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_LOOK_SECONDS)
                if isinstance(line, str):
                    yield line
                else:
                    talking -= 1
        self.expect_end()

    def expect_end(self) -> None:
        """Limits how long the commands are waited for: the run has ended, and some wait for lost hosts."""
        self._deadline = self._deadline or time.monotonic() + END_SECONDS

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _patience(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def status(self) -> int:
        """The exit status: the first that is not 0, of those that have ended by now; -N: by signal N."""
        return next(filter(None, map(self._status_of, self._processes)), 0)

    def _status_of(self, process: subprocess.Popen[str]) -> int | None:
        wait_for_end(process, self._patience())
        return exit_code(process)

    def _start(
        self, command: tuple[str, ...], stdin: str, log: Path, variables: Mapping[str, str]
    ) -> None:
        with log.open("ab") as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                    text=True,
                    errors="replace",
                    env=variables,
                )
            except OSError as error:
                raise PlanError(f"{command[0]} cannot be started: {error}.") from error
        self._processes.append(process)
        self._guard.watch(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        enlarge_pipe(process.stdout)
        with contextlib.suppress(BrokenPipeError), process.stdin as given:
            given.write(stdin)
        threading.Thread(target=self._read, args=(process, process.stdout), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        with output:
            for line in output:
                self._lines.put(line)
        self._lines.put(process)

    def _end(self) -> None:
        """Asks the commands that still run to end, and ends those that do not.

        A command that a signal has ended may have left behind what it had started.
        """
        running = [process for process in self._processes if exit_code(process) is None]
        for process in running:
            _signal(process, signal.SIGTERM)
        if running or any((exit_code(process) or 0) < 0 for process in self._processes):
            for command in self._last:
                self._run_last(command)
        for process in running:
            wait_for_end(process, END_SECONDS)
            _signal(process, signal.SIGKILL)

    def _run_last(self, command: tuple[str, ...]) -> None:
        """Runs one of the commands that end the others; those are ended also where it fails."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, check=False, capture_output=True, timeout=END_SECONDS)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Sends a signal to a command that was not collected yet, and to all of its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
