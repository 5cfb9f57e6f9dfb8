"""Promises of loading besides its speed: the same samples everywhere, and orders of any length."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import isotrain
from benchmarks.data.job import VARIABLE, Job
from benchmarks.data.programs import with_isotrain
from isotrain.core.data.loader import Loader
from isotrain.core.data.order.order import shuffled
from isotrain.core.data.order.samples import Samples

_WORKERS, _REPLICAS = (0, 1, 4), (1, 2, 3)


class Promise(NamedTuple):
    """A promise, what was seen of it, and whether it was kept."""

    text: str
    seen: str
    is_kept: bool


def promises() -> Iterator[Promise]:
    """All of them; takes about two minutes on 2 idle cores."""
    yield from _loss_curves()
    yield from _long_orders()


def _loss_curves() -> Iterator[Promise]:
    """Losses of images that are cropped at random, by workers and replicas, and after a kill."""
    losses = {(w, r): _losses(w, r) for w in _WORKERS for r in _REPLICAS}
    same = all(np.array_equal(losses[w, r], losses[0, r]) for w, r in losses)
    listed = ", ".join(map(str, _WORKERS))
    yield Promise(f"losses with {listed} workers: equal to the bit", _yes(same), same)
    for text, others in (
        ("losses with 1, 2, 3 replicas", list(losses.values())),
        ("losses after a kill in mid-epoch, 2 replicas", [_losses(2, 2, "kill")]),
    ):
        difference = max(float(np.max(np.abs(each / losses[0, 1] - 1))) for each in others)
        yield Promise(f"{text}: at most 1e-5 apart", f"{difference:.1e}", difference <= 1e-5)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _losses(workers: int, replicas: int, option: str = "") -> np.ndarray:
    """Mean losses of the epochs of a run, float64 [epochs]."""
    with TemporaryDirectory() as folder:
        job = Job("images", 0.05, replicas, workers, 3, folder, f"torch-ddp,{option}")
        os.environ |= job.variables()
        result = isotrain.run(
            with_isotrain.spec(job, checkpoint={"every_steps": 3}),
            backend="torch-ddp",
            replicas=replicas,
            max_restarts=int(bool(option)),
            output=Path(folder, "run"),
            on_event=lambda _: None,
        )
        assert bool(result.restarts) == bool(option)
        del os.environ[VARIABLE]
        return np.array(result.history.loss)


class _Numbers:
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return np.float32(index), index % 10


def _long_orders() -> Iterator[Promise]:
    """Memory of a shuffled order, and the time to the first batch, of 10^6 and 10^9 samples."""
    seconds, peaks = {}, {}
    for length in (10**6, 10**9):
        _first_batch(length)
        seconds[length] = min(_first_batch(length) for _ in range(3))
        tracemalloc.start()
        _first_batch(length)
        peaks[length] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    for text, seen, unit in (("memory", peaks, "MiB"), ("time to the first batch", seconds, "s")):
        million, billion = seen.values()
        figures = f"{billion:.3f} {unit}, {million:.3f} {unit} of 10^6"
        yield Promise(f"10^9 samples, {text}: as for 10^6", figures, billion <= 1.1 * million)


def _first_batch(length: int) -> float:
    """Seconds to the first global batch of so many samples."""
    began = time.perf_counter()
    options: dict[str, Any] = {"global_batch_size": 64, "seed": 0, "drop_remainder": False}
    source = isotrain.sources.MapStyle(_Numbers(length))
    order = shuffled(Samples.of(source, **options))
    loader = Loader(
        source, replicas=1, local_replicas=[0], order=order, epochs=1, prefetch=0, **options
    )
    next(iter(loader))
    return time.perf_counter() - began
