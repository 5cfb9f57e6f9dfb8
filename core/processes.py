"""Starting and ending the processes of a run on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import psutil

from isotrain.core.environment import ProcessContext
from isotrain.core.errors import PlanError
from isotrain.core.events import DESCRIPTOR_VARIABLE

LOCALHOST = "127.0.0.1"
_PORTS = range(15000, 32000)
"""Below the range from which systems take ports of outgoing connections."""
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); sys.argv = ['isotrain-worker'];"
    " from isotrain.core.worker import main; main()"
)


class RankProcess:
    """One started process, and the ends of its pipes that this process holds.

    Attributes:
        context: Its place in the run.
        events: Descriptor to read its events from.
        output: Rank 0's standard output; other ranks' goes to their log.
        log: The file with its output.
    """

    def __init__(
        self, context: ProcessContext, environment: Mapping[str, str], payload: bytes
    ) -> None:
        """Starts it; it is given `payload` on its standard input."""
        self.context = context
        self.log = Path(context.run_directory) / f"rank-{context.rank}.log"
        self.events, writing = os.pipe()
        relayed = context.rank == 0
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if relayed else log,
                stderr=log,
                env={
                    **os.environ,
                    **environment,
                    **context.to_variables(),
                    DESCRIPTOR_VARIABLE: str(writing),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)
        self.output: IO[bytes] | None = self._process.stdout
        threading.Thread(target=self._feed, args=(payload,), daemon=True).start()

    def _feed(self, payload: bytes) -> None:
        """Hands the job over; a process that never reads it must not block this one."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:
            stream.write(payload)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has suspended it."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        return False

    def ask_for_stacks(self) -> None:
        """Makes it write where each of its threads is to its log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)

    def family(self) -> list[psutil.Process]:
        """It and all that it started."""
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def close(self) -> None:
        """Closes this process's ends of the pipes."""
        os.close(self.events)
        if self.output is not None:
            self.output.close()
        self._process.wait()

    def end_group(self, number: signal.Signals) -> None:
        """Sends a signal to it and to all of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def end_all(processes: Iterable[RankProcess], patience: float = 2.0) -> None:
    """Ends processes and everything they started: politely, then after `patience` seconds for sure."""
    processes = list(processes)
    families = [member for process in processes for member in process.family()]
    for process in processes:
        process.end_group(signal.SIGTERM)
        process.end_group(signal.SIGCONT)
    _, alive = psutil.wait_procs(families, timeout=patience)
    for process in processes:
        process.end_group(signal.SIGKILL)
    for member in alive:
        with contextlib.suppress(psutil.Error):
            member.kill()
    psutil.wait_procs(alive, timeout=patience)


class Ports:
    """Ports on the loopback address for one run, leased so that no other run here takes them.

    A lease is a lock on a socket name of the kernel's abstract namespace: it ends with this process.
    """

    def __init__(self) -> None:
        self._leases: list[socket.socket] = []

    def take(self, count: int, first: int | None = None) -> tuple[str, ...]:
        """Leases `count` ports.

        Args:
            count: How many.
            first: Take this one and those after it, instead of any that are free.

        Returns:
            Their addresses, `host:port`.

        Raises:
            PlanError: A port that was asked for is in use, or none are left.
        """
        if first is not None:
            return tuple(self._exactly(port) for port in range(first, first + count))
        candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
        taken = (f"{LOCALHOST}:{port}" for port in candidates if self._lease(port))
        found = tuple(address for address, _ in zip(taken, range(count), strict=False))
        if len(found) < count:
            raise PlanError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}.")
        return found

    def _exactly(self, port: int) -> str:
        if not self._lease(port):
            raise PlanError(
                f"port {port} is in use on {LOCALHOST}. Choose another with --port, or leave it out"
                " and a free one is found."
            )
        return f"{LOCALHOST}:{port}"

    def _lease(self, port: int) -> bool:
        lease = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lease.bind(f"\0isotrain-port-{port}")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind((LOCALHOST, port))
        except OSError:
            lease.close()
            return False
        self._leases.append(lease)
        return True

    def close(self) -> None:
        """Gives the leases back."""
        for lease in self._leases:
            lease.close()
        self._leases.clear()


def wait_for_exit(processes: Iterable[RankProcess], seconds: float) -> bool:
    """Waits for processes that have finished their work to be gone; tells whether they are."""
    deadline = time.monotonic() + seconds
    processes = list(processes)
    while any(process.exit_code is None for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
