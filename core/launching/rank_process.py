"""Starting and ending the processes of a run on this machine."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from isotrain.core.contracts.process import VARIABLE, ProcessContext
from isotrain.core.contracts.reporter import PAGE_BYTES, Status, read_status
from isotrain.core.launching.payload import Payload
from isotrain.core.launching.run_directory import log_of

_START = (
    "import json, sys; start = json.loads(sys.stdin.buffer.readline()); sys.path[:] = start['path'];"
    " sys.argv[:] = start['argv']; from isotrain.core.running.worker import main; main(start)"
)
_READ_BYTES_PER_SECOND = 1e6
_SWEEPS = 3


class RankProcess:
    """One process of a run, and the ends of its pipes that this process holds.

    Attributes:
        context: Its place in the run.
        events: Descriptor to read its events from.
        output: Rank 0's standard output; other ranks' goes to their log.
        log: The file with its output.
    """

    def __init__(self, context: ProcessContext) -> None:
        """Opens the pipes; `start` starts it."""
        self.context = context
        self.log = log_of(Path(context.run_directory), context.rank)
        self.output: IO[bytes] | None = None
        self.events, self._writing = os.pipe()
        self._status = os.memfd_create("isotrain-status")  # memory: no full disk can break it
        os.truncate(self._status, PAGE_BYTES)
        self._page = mmap.mmap(self._status, PAGE_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None

    def start(self, environment: Mapping[str, str], payload: Payload) -> int:
        """Starts it with the job on its standard input; returns the id of its process group."""
        inherited = (self._writing, self._status, payload.descriptor)
        names = ("events", "status", "arrays")
        start = {
            "path": sys.path,
            "argv": sys.argv,  # modules of the run may read it when they are imported
            **dict(zip(names, inherited, strict=True)),
        }
        relayed = self.context.rank == 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if relayed else log,
                stderr=log,
                env={
                    **os.environ,
                    **environment,
                    **self.context.to_variables(),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=inherited,
                start_new_session=True,
            )
        os.close(self._writing)
        self._writing = -1
        self.output = self._process.stdout
        first_line = json.dumps(start).encode() + b"\n"
        threading.Thread(target=self._feed, args=(first_line, payload.stream), daemon=True).start()
        return self._process.pid

    def _feed(self, *parts: bytes) -> None:
        """Hands over its start and job; a process that never reads them must not block this one."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            for part in parts:
                pipe.write(part)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it.

        Until `close`, the ended process is kept as a zombie, so that nobody else gets its number.
        """
        if self._exit_code is None and self._process is not None:
            self._exit_code = _exit_code(self._process)
        return self._exit_code

    @property
    def status(self) -> Status:
        """Where it is, or was when it ended."""
        return read_status(self._page)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has suspended it."""
        with contextlib.suppress(psutil.Error):
            return self._own().status() == psutil.STATUS_STOPPED
        return False

    @property
    def effort(self) -> float:
        """Seconds of processor time it has used, plus a second for each megabyte it has read."""
        with contextlib.suppress(psutil.Error):
            own = self._own()
            times = own.cpu_times()
            return times.user + times.system + _bytes_read(own) / _READ_BYTES_PER_SECOND
        return 0.0

    def _own(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def ask_for_stacks(self) -> None:
        """Makes it write where each of its threads is to its log; only once it said it started."""
        if self._process is not None and self.exit_code is None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def family(self) -> list[psutil.Process]:
        """It and all that it started, as far as the system still knows."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                return [self._own(), *self._own().children(recursive=True)]
        return []

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
        if self.output is not None:
            self.output.close()
        self._page.close()
        os.close(self._status)
        if self._process is not None:
            self._process.wait()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else in this program has collected it
        return process.poll()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _bytes_read(process: psutil.Process) -> float:
    try:
        counters = process.io_counters()
    except (AttributeError, psutil.Error):  # not every system tells
        return 0.0
    return float(counters.read_bytes + counters.read_chars)


def end_all(processes: Sequence[RankProcess], patience: float = 2.0) -> None:
    """Ends processes and everything they started: politely, then after `patience` seconds for sure.

    Args:
        processes: Of one run.
        patience: Seconds they have to end by themselves.
    """
    members = _everyone(processes)
    try:
        _signal(processes, members, signal.SIGTERM)
        _signal(processes, members, signal.SIGCONT)
        _wait(members, patience)
    finally:
        _kill(processes, members, patience)


def _kill(
    processes: Sequence[RankProcess], members: Sequence[psutil.Process], patience: float
) -> None:
    """Ends them for sure, and what they have started meanwhile."""
    for _ in range(_SWEEPS):
        _signal(processes, members, signal.SIGKILL)
        _wait(members, patience)
        members = [member for member in _everyone(processes) if _is_alive(member)]
        if not members:
            return


def _everyone(processes: Sequence[RankProcess]) -> list[psutil.Process]:
    """The processes, their descendants, and whatever else carries the run's mark."""
    found = {member for process in processes for member in process.family()}
    for directory in {process.context.run_directory for process in processes}:
        found.update(_marked(json.dumps(directory)))
    return list(found)


def _marked(directory: str) -> Iterable[psutil.Process]:
    """Processes that inherited a run's variable: also those whose parent is gone."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if directory in process.environ().get(VARIABLE, ""):
                yield process


def _signal(
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


def _wait(members: Sequence[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(_is_alive(member) for member in members) and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_for_exit(processes: Iterable[RankProcess], seconds: float) -> None:
    """Waits for processes that have finished their work to be gone, `seconds` at most."""
    deadline = time.monotonic() + seconds
    processes = list(processes)
    while any(process.exit_code is None for process in processes):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
