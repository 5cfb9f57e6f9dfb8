"""Rank processes on this machine: starting them, talking to them, and ending all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import psutil

from isotrain.core.contracts.process import Address, ProcessContext
from isotrain.core.contracts.reporter import Status
from isotrain.core.launching.forkserver.process_handle import ProcessArgs, ProcessHandle
from isotrain.core.launching.forkserver.process_starter import ProcessStarter
from isotrain.core.launching.processes.process_tree import run_processes
from isotrain.core.launching.processes.status_page import StatusPage
from isotrain.core.launching.run_directory.pipes import LineReader
from isotrain.core.launching.run_directory.run_directory import rank_log
from isotrain.core.system.deadline import Deadline
from isotrain.core.system.interpreter_start import startup_line
from isotrain.core.system.pickling import Payload
from isotrain.core.system.process_activity import activity, waits
from isotrain.core.system.standard_streams import enlarge_pipe

_KILL_ROUNDS = 3


class RankProcess(StatusPage):
    """A rank process on this machine, with the launcher's ends of its pipes.

    Attributes:
        context: Process context (rank, processes, run directory).
        info: Rank, host and role of the process.
        events: Descriptor from which to read its events.
        log: File with its output.
    """

    def __init__(self, context: ProcessContext) -> None:
        """Opens the pipes; `start` starts the process."""
        super().__init__()
        self.context = context
        self.info = context.local_process
        self.log = rank_log(Path(context.run_directory), context.rank)
        self._output: IO[bytes] | None = None
        self.events, self._event_writer = os.pipe()
        self._lines = LineReader(self.events)
        self._process: ProcessHandle | None = None
        self._exit_code: int | None = None
        self._last_status: Status | None = None
        """Status at its end, once it is closed."""

    def start(self, starter: ProcessStarter, payload: Payload) -> int:
        """Starts the process with the job on its standard input; returns the id of its process group.

        Args:
            starter: Starts the processes of the run.
            payload: Pickled job.

        Raises:
            RunFailedError: It cannot be started.
        """
        stdin, feed = _open_pipe()
        with (
            contextlib.ExitStack() as cleanup,
            stdin,
            self.log.open("ab") as log,
            self._open_stdout(log) as stdout,
        ):
            cleanup.enter_context(feed)
            self._process = starter.spawn(
                ProcessArgs(
                    {**starter.variables, **self.context.to_variables()},
                    (stdin.fileno(), stdout.fileno(), log.fileno()),
                    (self._event_writer, self.page_file, payload.descriptor),
                )
            )
            parts = (feed, startup_line(), payload.stream)
            threading.Thread(target=_feed, args=parts, daemon=True).start()
            cleanup.pop_all()
        os.close(self._event_writer)
        self._event_writer = -1
        return self._process.pid

    def _open_stdout(self, log: IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Opens its standard output: a pipe to this process for rank 0, the log for other ranks."""
        if self.context.rank:
            return contextlib.nullcontext(log)
        self._output, writing = _open_pipe()
        enlarge_pipe(writing)  # this process may be suspended (Ctrl-Z)
        return writing

    @property
    def output(self) -> int | None:
        """Descriptor of rank 0's standard output; None for other ranks, which write to their logs."""
        return None if self._output is None else self._output.fileno()

    def read_lines(self) -> list[bytes] | None:
        """New events, one JSON line each, without waiting; None at the end."""
        return self._lines.read()

    @property
    def pid(self) -> int | None:
        """Process id, which is also its session id; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative if a signal ended it.

        Until `close`, the ended process stays a zombie, so that its process id is not reused.
        """
        if self._exit_code is None and self._process is not None:
            self._exit_code = self._process.exit_code
        return self._exit_code

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self.exit_code is not None

    @property
    def status(self) -> Status:
        """Current step and call of the process, or those at its end."""
        return self._last_status or super().status

    @property
    def address(self) -> Address:
        """Address of this machine, and the port that is reserved for it."""
        return self.context.address

    @property
    def accepts_requests(self) -> bool:
        """Whether its training loop reads checkpoint requests.

        True for a process that has none: without a session, or one that joins a run, whose others have it.
        """
        has_loop = self.context.has_session and not self.context.joins
        return not has_loop or super().accepts_requests

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has suspended it."""
        with contextlib.suppress(psutil.Error):
            return (
                self._process is not None
                and psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
            )
        return False

    @property
    def activity(self) -> float:
        """Activity in seconds, see `process_activity.activity`."""
        return 0.0 if self._process is None else activity(self._process.pid)

    @property
    def waits(self) -> dict[int, float]:
        """Seconds that each thread was runnable without a core, by thread id."""
        return {} if self._process is None else waits(self._process.pid)

    def request_stacks(self) -> None:
        """Has it write the stacks of its threads to its log (SIGUSR1); only after its first event."""
        if self._process is not None and self.exit_code is None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kills its process group."""
        self.end_group(signal.SIGKILL)

    def end_group(self, number: signal.Signals) -> None:
        """Sends a signal to its process group; not after `close`."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Closes this process's ends of the pipes, and reaps the process. Status and exit code stay known."""
        self._exit_code, self._last_status = self.exit_code, self.status
        os.close(self.events)
        if self._event_writer >= 0:
            os.close(self._event_writer)
        if self._output is not None:
            self._output.close()
        self._page.close()
        os.close(self.page_file)
        if self._process is not None:
            self._process.release()
            self._process = None


def _open_pipe() -> tuple[IO[bytes], IO[bytes]]:
    """A pipe: the end to read from and the end to write to."""
    reading, writing = os.pipe()
    return open(reading, "rb", buffering=0), open(writing, "wb")


def _feed(pipe: IO[bytes], *parts: bytes) -> None:
    """Thread that writes the startup line and the job, because a process may never read them."""
    with contextlib.suppress(OSError), pipe:
        for part in parts:
            pipe.write(part)


def terminate_all(processes: Sequence[RankProcess], timeout: float = 2.0) -> None:
    """Ends rank processes and everything that they have started: SIGTERM, then SIGKILL.

    Args:
        processes: Rank processes of one run.
        timeout: Seconds between SIGTERM and SIGKILL.
    """
    members = _all_members(processes)
    try:
        _signal_all(processes, members, signal.SIGTERM)
        _signal_all(processes, members, signal.SIGCONT)
        _wait_for_end(members, timeout)
    finally:
        _kill_all(processes, members, timeout)


def _kill_all(
    processes: Sequence[RankProcess], members: Sequence[psutil.Process], timeout: float
) -> None:
    """Kills all members, and in further rounds those that were started meanwhile."""
    for _ in range(_KILL_ROUNDS):
        _signal_all(processes, members, signal.SIGKILL)
        _wait_for_end(members, timeout)
        members = [member for member in _all_members(processes) if _is_alive(member)]
        if not members:
            return


def _all_members(processes: Sequence[RankProcess]) -> list[psutil.Process]:
    ranks = {process.pid for process in processes if process.pid is not None}
    return run_processes(ranks, {process.context.run_directory for process in processes})


def _signal_all(
    processes: Iterable[RankProcess], members: Iterable[psutil.Process], number: signal.Signals
) -> None:
    for process in processes:
        process.end_group(number)
    for member in members:
        with contextlib.suppress(psutil.Error):
            member.send_signal(number)


def _is_alive(member: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    return False


def _wait_for_end(members: Sequence[psutil.Process], seconds: float) -> None:
    deadline = Deadline(seconds)
    while any(_is_alive(member) for member in members) and not deadline.is_over:
        time.sleep(0.01)


def wait_for_exit(processes: Iterable[RankProcess], seconds: float) -> None:
    """Waits until processes that have finished their work have exited, `seconds` at most."""
    deadline = Deadline(seconds)
    processes = list(processes)
    while any(process.exit_code is None for process in processes):
        if deadline.is_over:
            return
        time.sleep(0.01)
