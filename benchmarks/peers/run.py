"""Runs one contender once, and measures it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.peers.contenders import Command, Contender
from benchmarks.peers.job import Job

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 900
_SAMPLE_SECONDS = 0.1
_LOG_CHARACTERS = 3000
_MIB = 1 << 20


class ContenderError(Exception):
    """A contender failed, or trained something else."""


@dataclass(frozen=True)
class Cell:
    """A cell of the measurements: a contender, a workload and its size.

    Attributes:
        contender: Contender that trains.
        workload: Name of the workload.
        replicas: Number of replicas.
        threads: Number of threads of each replica.
        clock: Clock that times the steps, one of `CLOCKS`.
    """

    contender: Contender
    workload: str
    replicas: int
    threads: int
    clock: str = "wall"

    @property
    def configuration(self) -> tuple[str, int, int]:
        """Workload, replicas and threads, which cells that are compared have in common."""
        return self.workload, self.replicas, self.threads

    def __str__(self) -> str:
        return f"{self.contender.name}, {self.workload}, {self.replicas} x {self.threads}"


@dataclass(frozen=True)
class Measured:
    """Measurements of one run.

    Attributes:
        step: Seconds per timed step, of the process that took most.
        first_step: Seconds from the command to the end of the first step, of the slowest process.
        memory: MiB of all processes together at their peak, each shared page counted once; 0 when
            it was not looked at.
        losses: Means over all replicas, of the steps that are not timed and of those that are.
    """

    step: float
    first_step: float
    memory: float
    losses: tuple[float, float]


def run(cell: Cell, *, look_at_memory: bool) -> Measured:
    """Runs a cell once in processes of its own.

    Args:
        cell: Cell to run.
        look_at_memory: Whether to measure memory too, which takes time away from the training.

    Raises:
        ContenderError: It failed; the message has the end of its output.
    """
    with TemporaryDirectory() as folder:
        job = Job(
            cell.workload,
            cell.replicas,
            cell.threads,
            cell.clock,
            folder,
            dict(cell.contender.options),
        )
        commands = cell.contender.commands(cell.contender.program, cell.replicas)
        start = time.time()
        with _started(commands, job) as processes:
            peak = _peak_memory(processes) if look_at_memory else 0.0
            codes = [process.wait(_LIMIT_SECONDS) for process in processes]
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        if any(codes) or not ranks:
            log = Path(folder, "log").read_text(errors="replace")[-_LOG_CHARACTERS:]
            raise ContenderError(f"{cell}: ended with {codes}.\n{log}")
    return Measured(
        step=max(rank["seconds"] for rank in ranks) / _timed_steps(job),
        first_step=max(rank["first_step"] for rank in ranks) - start,
        memory=peak,
        losses=(_mean([r["losses"][0] for r in ranks]), _mean([r["losses"][1] for r in ranks])),
    )


@contextlib.contextmanager
def _started(commands: list[Command], job: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes, which are gone with all of their children at the end."""
    common = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    common |= job.variables() | {
        "PYTHONPATH": str(_ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": job.options.get("framework", "tensorflow"),
    }
    processes: list[subprocess.Popen[bytes]] = []
    with Path(job.folder, "log").open("wb") as log:
        try:
            for command in commands:
                processes.append(
                    subprocess.Popen(
                        command.line,
                        cwd=_ROOT,
                        env=common | command.variables,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
            yield processes
        finally:
            for process in _family(processes):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for each in processes:
                each.wait()


def _family(processes: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    """The processes that still run, and all of their children."""
    found: list[psutil.Process] = []
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(process.pid)
                found += [*top.children(recursive=True), top]
    return found


def _peak_memory(processes: list[subprocess.Popen[bytes]]) -> float:
    """Looks at all processes until they have ended; MiB at the peak."""
    peak, end = 0.0, time.monotonic() + _LIMIT_SECONDS
    pause = threading.Event()
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        peak = max(peak, sum(map(_own_memory, _family(processes))))
        pause.wait(_SAMPLE_SECONDS)
    return peak / _MIB


def _own_memory(process: psutil.Process) -> int:
    """Proportional set size: a page that n processes share counts 1/n for each."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def _timed_steps(job: Job) -> int:
    return job.work.timed_epochs * job.work.steps_per_epoch


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
