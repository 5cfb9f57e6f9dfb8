"""The job of one process of a contender, and the results that it leaves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import WORKLOADS, Workload

_VARIABLE = "PEERS_JOB"
CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
}
"""Seconds that pass; and those that a process' threads keep cores busy, which others disturb less."""


@dataclass(frozen=True)
class Job:
    """One run of one contender.

    Attributes:
        workload: Name of the workload.
        replicas: Number of replicas.
        threads: Number of threads of each replica.
        clock: Clock of the timed steps, one of `CLOCKS`.
        folder: Folder in which every process leaves its results.
        options: Options of the contender.
    """

    workload: str
    replicas: int
    threads: int
    clock: str
    folder: str
    options: dict[str, Any]

    @classmethod
    def of_this_process(cls) -> Job:
        """The job that this process was started with."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    def variables(self) -> dict[str, str]:
        """The environment variables that hand it over."""
        return {_VARIABLE: json.dumps(asdict(self)), "OMP_NUM_THREADS": str(self.threads)}

    def now(self) -> float:
        """Current time of the job's clock in seconds."""
        return CLOCKS[self.clock]()

    @property
    def work(self) -> Workload:
        """The workload that is trained."""
        return WORKLOADS[self.workload]


class Clock:
    """Takes the times of a training loop, and keeps its losses.

    A loss is read where a time is taken, and nowhere else: reading waits for the device.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._losses: list[Any] = []
        self._first = self._start = self._end = 0.0

    def step_done(self, loss: Any) -> None:
        """Called after every step with its loss: a number, or a scalar of the framework."""
        losses, work = self._losses, self._job.work
        losses.append(loss)
        if len(losses) == 1:
            float(loss)
            self._first = time.time()
        if len(losses) == work.first_steps:
            float(loss)
            self._start = self._job.now()
        elif len(losses) == work.steps:
            float(loss)
            self._end = self._job.now()

    def write(self, rank: int) -> None:
        """Leaves times and losses behind; called by every process after the last step."""
        work = self._job.work
        losses = [float(loss) for loss in self._losses]
        assert len(losses) == work.steps, (len(losses), work.steps)
        first, timed = losses[: work.first_steps], losses[work.first_steps :]
        leave(
            self._job,
            rank,
            first_step=self._first,
            seconds=self._end - self._start,
            losses=(sum(first) / len(first), sum(timed) / len(timed)),
        )


def leave(
    job: Job, rank: int, *, first_step: float, seconds: float, losses: tuple[float, float]
) -> None:
    """Leaves one process's results in the job's folder.

    Args:
        job: The job.
        rank: Rank of the process.
        first_step: End of its first step, in seconds since the epoch.
        seconds: Duration from the end of the last step that is not timed to that of the last one.
        losses: The means over the steps that are not timed, and over those that are.
    """
    text = json.dumps({"first_step": first_step, "seconds": seconds, "losses": losses})
    Path(job.folder, f"{rank}.json").write_text(text, encoding="utf-8")
