"""The local commands that start ranks through a scheduler (srun, mpirun, kubectl ...): output and end."""

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
"""Time for a command to end its ranks before it is killed."""

_POLL_SECONDS = 0.2


class SchedulerProcess:
    """The running commands of a submission; a context manager, at whose end all of them have ended."""

    def __init__(self, submission: Submission, log: Path, variables: Mapping[str, str]) -> None:
        """Starts the commands.

        Args:
            submission: Submission with the commands.
            log: File for their standard error.
            variables: Complete environment of the commands.

        Raises:
            PlanError: A command cannot be started.
        """
        self._cleanup_commands = submission.cleanup_commands
        self._deadline: float | None = None
        self._lines: queue.SimpleQueue[str | subprocess.Popen[str]] = queue.SimpleQueue()
        """Lines of the commands' standard output; each process itself at the end of its output."""
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
        for process in self._processes:  # not earlier: their process ids must not be reused
            process.wait()

    def lines(self) -> Iterator[str]:
        """Yields the lines of standard output until all commands have ended, or the deadline has passed."""
        running = len(self._processes)
        while running and not self._is_late():
            if any(map(exit_code, self._processes)):  # the others may wait for it
                self.expect_end()
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_POLL_SECONDS)
                if isinstance(line, str):
                    yield line
                else:
                    running -= 1
        self.expect_end()

    def expect_end(self) -> None:
        """Sets the deadline of the commands: the run has ended, but some may wait for lost hosts."""
        self._deadline = self._deadline or time.monotonic() + END_SECONDS

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _remaining_seconds(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def status(self) -> int:
        """First non-zero exit code of the ended commands, or 0; -N if signal N ended it. Waits for them."""
        return next(filter(None, map(self._await_exit_code, self._processes)), 0)

    def _await_exit_code(self, process: subprocess.Popen[str]) -> int | None:
        wait_for_end(process, self._remaining_seconds())
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
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:
            stream.write(stdin)
        threading.Thread(target=self._read, args=(process, process.stdout), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        with output:
            for line in output:
                self._lines.put(line)
        self._lines.put(process)

    def _end(self) -> None:
        """Ends running commands: SIGTERM, the cleanup commands, then SIGKILL.

        Cleanup also runs if a signal has ended a command, which may have left its ranks behind.
        """
        running = [process for process in self._processes if exit_code(process) is None]
        for process in running:
            _signal(process, signal.SIGTERM)
        if running or any((exit_code(process) or 0) < 0 for process in self._processes):
            for command in self._cleanup_commands:
                self._run_cleanup(command)
        for process in running:
            wait_for_end(process, END_SECONDS)
            _signal(process, signal.SIGKILL)

    def _run_cleanup(self, command: tuple[str, ...]) -> None:
        """Runs a cleanup command, and ignores its failure: the commands are killed afterwards anyway."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, check=False, capture_output=True, timeout=END_SECONDS)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Sends a signal to the process group of a command that is not reaped yet."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
