"""Starting and ending the processes of a run on this machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.reporter import (
    PAGE_BYTES,
    Status,
    accepts_requests,
    allow_exit,
    read_status,
    request_checkpoint,
)
from isotrain.core.launching.forkserver.process_handle import ProcessArgs, ProcessHandle, Spawn
from isotrain.core.launching.processes.job_pickle import Payload
from isotrain.core.launching.processes.process_tree import run_processes
from isotrain.core.launching.run_directory.pipes import LineReader
from isotrain.core.launching.run_directory.run_directory import rank_log
from isotrain.core.system.deadline import Deadline
from isotrain.core.system.interpreter import startup_line
from isotrain.core.system.process_activity import activity, waits
from isotrain.core.system.standard_streams import enlarge_pipe

_SWEEPS = 3


class RankProcess:
    """One process of a run, and the ends of its pipes that this process holds.

    Attributes:
        context: Its place in the run.
        peer: Who it is, as the others know it.
        events: Descriptor to read its events from.
        log: The file with its output.
    """

    def __init__(self, context: ProcessContext) -> None:
        """Opens the pipes; `start` starts it."""
        self.context = context
        self.peer = context.local_peer
        self.log = rank_log(Path(context.run_directory), context.rank)
        self._output: IO[bytes] | None = None
        self.events, self._writing = os.pipe()
        self._lines = LineReader(self.events)
        self._status = os.memfd_create("isotrain-status")  # memory: no full disk can break it
        os.truncate(self._status, PAGE_BYTES)
        self._page = mmap.mmap(self._status, PAGE_BYTES)
        self._process: ProcessHandle | None = None
        self._exit_code: int | None = None

    def start(self, variables: Mapping[str, str], payload: Payload, begin: Spawn) -> int:
        """Starts it with the job on its standard input; returns the id of its process group.

        Args:
            variables: All variables but those that tell it its place.
            payload: The job.
            begin: A way to start it.
        """
        stdin, feed = _pipe()
        with contextlib.ExitStack() as undoing, stdin, self.log.open("ab") as log:
            undoing.enter_context(feed)
            with self._stdout_beside(log) as stdout:
                self._process = begin(
                    ProcessArgs(
                        {**variables, **self.context.to_variables()},
                        (stdin.fileno(), stdout.fileno(), log.fileno()),
                        (self._writing, self._status, payload.descriptor),
                    )
                )
            parts = (feed, startup_line(), payload.stream)
            threading.Thread(target=_feed, args=parts, daemon=True).start()
            undoing.pop_all()
        os.close(self._writing)
        self._writing = -1
        return self._process.pid

    def _stdout_beside(self, log: IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Where its standard output goes: rank 0's to a pipe to here."""
        if self.context.rank:
            return contextlib.nullcontext(log)
        self._output, writing = _pipe()
        enlarge_pipe(writing)  # this process may be stopped (Ctrl-Z)
        return writing

    @property
    def output(self) -> int | None:
        """Rank 0's standard output, to read from; other ranks' goes to their log."""
        return None if self._output is None else self._output.fileno()

    def read_lines(self) -> list[bytes] | None:
        """The events that it has told, a line each, without waiting; None when no more will come."""
        return self._lines.read()

    @property
    def pid(self) -> int | None:
        """Its number, and that of its session; None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it.

        Until `close`, the ended process is kept as a zombie, so that nobody else gets its number.
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
        """Where it is, or was when it ended."""
        return read_status(self._page)

    def allow_exit(self) -> None:
        """Tells it that all have finished: until then it does not end."""
        allow_exit(self._page)

    def request_checkpoint(self, *, and_end: bool) -> None:
        """Tells it that a checkpoint is wanted, and whether the run is to end after that."""
        request_checkpoint(self._page, and_end=and_end)

    @property
    def accepts_requests(self) -> bool:
        """Whether its loop looks for wishes; one that serves another has no loop."""
        return not self.context.has_session or accepts_requests(self._page)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has suspended it."""
        with contextlib.suppress(psutil.Error):
            return self._own().status() == psutil.STATUS_STOPPED
        return False

    @property
    def activity(self) -> float:
        """What it has done; see `activity`."""
        return 0.0 if self._process is None else activity(self._process.pid)

    @property
    def waits(self) -> dict[int, float]:
        """How long each of its threads was ready, and had no processor."""
        return {} if self._process is None else waits(self._process.pid)

    def _own(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def request_stacks(self) -> None:
        """Makes it write where each of its threads is to its log; only once it said it started."""
        if self._process is not None and self.exit_code is None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Ends it for sure, and all of its process group."""
        self.end_group(signal.SIGKILL)

    def end_group(self, number: signal.Signals) -> None:
        """Sends a signal to it and to all of its process group; until `close`."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Closes this process's ends of the pipes, and lets the system forget the process."""
        os.close(self.events)
        if self._writing >= 0:
            os.close(self._writing)
        if self._output is not None:
            self._output.close()
        self._page.close()
        os.close(self._status)
        if self._process is not None:
            self._process.release()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """The end to read from and the end to write to."""
    reading, writing = os.pipe()
    return open(reading, "rb", buffering=0), open(writing, "wb")


def _feed(pipe: IO[bytes], *parts: bytes) -> None:
    """Hands over its start and job; a process that never reads them must not block this one."""
    with contextlib.suppress(OSError), pipe:
        for part in parts:
            pipe.write(part)


def terminate_all(processes: Sequence[RankProcess], patience: float = 2.0) -> None:
    """Ends processes and everything they started: politely, then after `patience` seconds for sure.

    Args:
        processes: Of one run.
        patience: Seconds they have to end by themselves.
    """
    everyone = _everyone(processes)
    try:
        _signal(processes, everyone, signal.SIGTERM)
        _signal(processes, everyone, signal.SIGCONT)
        _wait(everyone, patience)
    finally:
        _kill(processes, everyone, patience)


def _kill(
    processes: Sequence[RankProcess], everyone: Sequence[psutil.Process], patience: float
) -> None:
    """Ends them for sure, and what they have started meanwhile."""
    for _ in range(_SWEEPS):
        _signal(processes, everyone, signal.SIGKILL)
        _wait(everyone, patience)
        everyone = [member for member in _everyone(processes) if _is_alive(member)]
        if not everyone:
            return


def _everyone(processes: Sequence[RankProcess]) -> list[psutil.Process]:
    ranks = {process.pid for process in processes if process.pid is not None}
    return run_processes(ranks, {process.context.run_directory for process in processes})


def _signal(
    processes: Iterable[RankProcess], everyone: Iterable[psutil.Process], number: signal.Signals
) -> None:
    for process in processes:
        process.end_group(number)
    for member in everyone:
        with contextlib.suppress(psutil.Error):
            member.send_signal(number)


def _is_alive(member: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    return False


def _wait(everyone: Sequence[psutil.Process], seconds: float) -> None:
    patience = Deadline(seconds)
    while any(_is_alive(member) for member in everyone) and not patience.is_over:
        time.sleep(0.01)


def wait_for_exit(processes: Iterable[RankProcess], seconds: float) -> None:
    """Waits for processes that have finished their work to be gone, `seconds` at most."""
    patience = Deadline(seconds)
    processes = list(processes)
    while any(process.exit_code is None for process in processes):
        if patience.is_over:
            return
        time.sleep(0.01)
