"""Data sets like Keras' `PyDataset`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np

INPUTS = np.arange(40, dtype=np.float32).reshape(20, 2)
TARGETS = np.arange(20)


class PyDataset:
    """A data set like Keras' class of this name: it shuffles at the end of each epoch."""

    def __init__(self) -> None:
        self.rows = np.arange(20)
        self.random = np.random.default_rng(4)

    @property
    def num_batches(self) -> int | None:
        return 5

    def __getitem__(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows[4 * position : 4 * position + 4]
        return INPUTS[rows], TARGETS[rows]

    def on_epoch_end(self) -> None:
        self.random.shuffle(self.rows)


class Threaded(PyDataset):
    """The same with threads of its own; later batches are made faster, and errors come late."""

    workers, max_queue_size = 3, 4

    def __init__(self, failing: int = -1) -> None:
        super().__init__()
        self.failing = failing
        self.all_wait = threading.Barrier(3)

    def __getitem__(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        if position < 3:
            self.all_wait.wait(60.0)  # so three of them are made at once
            time.sleep(0.02 * (3 - position))
        if position == self.failing:
            raise RuntimeError("a broken batch")
        return super().__getitem__(position)


class Processes(PyDataset):
    """The same with processes of its own; its shuffles are drawn from entropy."""

    use_multiprocessing, max_queue_size = True, 4

    def __init__(self, workers: int = 3, fault: str = "", file: str = "") -> None:
        super().__init__()
        self.random = np.random.default_rng()
        self.workers = workers
        self.fault, self.file = fault, file

    def __getitem__(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        if position == 3 and self.fault:
            getattr(self, self.fault)()
        return super().__getitem__(position)

    def raises(self) -> None:
        raise RuntimeError("a broken batch")

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def waits(self) -> None:
        """Makes a file, and removes it when its stack is requested; then goes on."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        Path(self.file).touch()
        signal.sigwait({signal.SIGUSR1})
        Path(self.file).unlink()


class Pids(Processes):
    """Process ids, and numbers that are drawn."""

    def __getitem__(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        drawn = [[random.random(), np.random.random()] for _ in range(4)]
        return np.array(drawn), np.full(4, os.getpid())


class Large(Processes):
    """A large array, which is changed after each epoch."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.array = np.zeros(1_000_000)

    def __getitem__(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        return self.array[4 * position : 4 * position + 4], TARGETS[:4]

    def on_epoch_end(self) -> None:
        self.array += 1
