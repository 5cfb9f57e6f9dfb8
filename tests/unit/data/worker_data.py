"""Data sets that worker processes load, and what they do wrong."""

import mmap
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 37


class Drawing:
    """Samples that draw from the global generators; sample i has the target i."""

    def __init__(self, length: int = LENGTH, *, with_torch: bool = False) -> None:
        self.length = length
        self.with_torch = with_torch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        drawn = [index, random.random(), np.random.random(), float(np.random.normal())]
        if self.with_torch:
            import torch

            drawn.append(float(torch.rand(())))
        return np.array(drawn), index


class Unseeded(Drawing):
    """Samples that draw from a generator of the data set's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.generator.random(3), index


class Pids(Drawing):
    """Samples that tell in which process they were made."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.array([os.getpid()]), index


class Wide(Drawing):
    """Samples of 16 KiB."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(2000, float(index)), index


class Columns:
    """A data set whose samples come by a list of indices, as a dict of columns."""

    column_names = ("x", "y")

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, indices: list[int]) -> dict[str, np.ndarray]:
        return {"x": np.array(indices) * 2.0, "y": np.array(indices)}


class Faulty(Drawing):
    """Does something wrong at sample 20."""

    def __init__(self, fault: str, begun: Path | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.begun = begun  # a file that says that a worker hangs

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == 20:
            getattr(self, self.fault)()
        return super().__getitem__(index)

    def raises(self) -> None:
        raise ValueError("this sample is broken")

    def exits(self) -> None:
        os._exit(3)

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def crashes(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(self) -> None:
        assert self.begun is not None
        self.begun.touch()
        time.sleep(1000)

    def stops_iteration(self) -> None:
        raise StopIteration


class WithLock(Drawing):
    """A data set that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()


class Cache:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class WithThread(Drawing):
    """A data set that starts a thread with its first sample."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: threading.Thread | None = None

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if self.thread is None:
            self.thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
            self.thread.start()
        return super().__getitem__(index)


class BadInWorker(Drawing):
    """A data set that cannot be made in another process."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        if os.getpid() != pid:
            raise OSError("no such folder")
        self.pid = pid

    def __reduce__(self) -> Any:
        return BadInWorker, (self.pid,)


class Large(Drawing):
    """A data set with a large array in memory; samples tell how it is mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.arange(1_000_000.0)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        base = self.array
        while isinstance(base, np.ndarray):
            base = base.base
        is_mapped = isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap)
        return self.array[index : index + 2] + 0.5 * is_mapped, index


def draws(inputs: Any, targets: Any, random: Any) -> Any:
    """A transform that draws for each sample."""
    return inputs + random.normal(shape=(1,)), targets


def mixes(inputs: Any, targets: Any, random: Any) -> Any:
    """A transform that mixes samples."""
    return inputs - inputs.mean(0), targets


def initialize(index: int) -> None:
    """A `worker_init_fn` that tells its index to the samples of `Initialized`."""
    Initialized.index = index


class Initialized(Drawing):
    """Samples that tell what `initialize` and torch's `get_worker_info` say."""

    index = -1

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        numbers = [-1, 0, 0] if info is None else [info.id, info.num_workers, len(info.dataset)]
        return np.array([self.index, *numbers]), index
