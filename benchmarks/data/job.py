"""The job of one run of a contender, and the times that it leaves."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.data.workloads import Workload, workload

VARIABLE = "DATA_JOB"


@dataclass(frozen=True)
class Job:
    """One run of one contender.

    Attributes:
        name: Name of the workload.
        scale: Fraction of its samples.
        replicas: Number of replicas.
        workers: Worker processes on the host.
        epochs: Number of epochs; the first and the last are not timed.
        folder: Folder of the run's results, which no other run has.
        options: Options of the contender, as text.
    """

    name: str
    scale: float
    replicas: int
    workers: int
    epochs: int
    folder: str
    options: str = ""

    @classmethod
    def of_this_process(cls) -> Job:
        """The job that this process was started with."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def variables(self) -> dict[str, str]:
        """The environment variables that hand it over."""
        return {
            VARIABLE: json.dumps(asdict(self)),
            "DATA_READS": f"{self.folder}/reads",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def timed_samples(self) -> int:
        """Number of samples of all timed epochs."""
        return self.work.samples * (self.epochs - 2)

    @property
    def work(self) -> Workload:
        """The samples that are loaded."""
        return workload(self.name, self.scale)


class Clock:
    """Takes the times of rank 0, from the end of the first epoch to that of the last but one.

    In the last epoch workers may have ended, whose processor time nobody can read then.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._epochs = 0
        self._start = (0.0, 0.0)

    def epoch_done(self) -> None:
        """Called by every process at the end of each epoch."""
        self._epochs += 1
        if self._rank == 0 and self._epochs == 1:
            self._start = time.perf_counter(), _processor_seconds()
        elif self._rank == 0 and self._epochs == self._job.epochs - 1:
            wall, processor = time.perf_counter(), _processor_seconds()
            seen = {"wall": wall - self._start[0], "processor": processor - self._start[1]}
            Path(self._job.folder, "times.json").write_text(json.dumps(seen), encoding="utf-8")


def _processor_seconds() -> float:
    """Processor time of all processes of this run, which have its variable in common."""
    own, seconds = os.environ[VARIABLE], 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == own:
                times = process.cpu_times()
                seconds += times.user + times.system
        except psutil.Error:
            continue
    return seconds
