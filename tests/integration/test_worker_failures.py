"""Runs whose worker processes, or the processes that these work for, raise, hang or are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from helpers.leftover_processes import is_alive
from helpers.signals import heed_signals
from helpers.waiting import wait_until
from integration.resume_runs import assert_same, plain

import isotrain
from isotrain.core.errors import RunFailedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("reference")

SAMPLES, FATAL = 30, 17


class Sharding:
    """A stream that shards itself."""

    def __len__(self) -> int:
        return 1

    def iterate(self, *, epoch: int, seed: int, replica: int, replicas: int) -> Iterator[Any]:
        yield np.zeros((3, 4)), np.zeros(3, int)


class Samples:
    """Samples with noise, of which one does something once: as long as it finds a file of that name."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == FATAL:
            for flag in self.folder.glob("*.once"):
                flag.unlink()
                (self.folder / "worker").write_text(str(os.getpid()))
                getattr(self, flag.stem)()
        inputs = np.random.default_rng(index).standard_normal(4)
        return inputs + 0.1 * random.random() + 0.1 * np.random.random(4), index % 3

    def raises(self) -> None:
        raise ValueError("this image is broken")

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self) -> None:
        time.sleep(1000)

    def kills_rank(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        while True:  # busy, and deaf to all but the kernel
            pass


def samples(folder: str) -> Samples:
    return Samples(folder)


def run(folder: Path, *, flags: tuple[str, ...] = (), **changes: Any) -> isotrain.RunResult:
    """Trains on the reference backend, in a folder with flags for the samples."""
    flag_folder = folder.with_name(f"{folder.name}-flags")
    flag_folder.mkdir()
    for flag in flags:
        (flag_folder / f"{flag}.once").touch()
    fields: Mapping[str, Any] = {
        "model": {"numpy": plain},
        "data": samples,
        "data_args": {"folder": str(flag_folder)},
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "precision": "float64",
        "global_batch_size": 7,
        "epochs": 3,
        "checkpoint": {"every_steps": 2},
        "loader": {"workers": 2},
    }
    options = {name: changes.pop(name) for name in ("max_restarts", "replicas") if name in changes}
    return isotrain.run(
        {**fields, **changes},
        backend="reference",
        output=folder,
        on_event=lambda _: None,
        **{"replicas": 2, **options},
    )


def worker_of(folder: Path) -> int:
    """Process id of the worker that did something."""
    return int((folder.with_name(f"{folder.name}-flags") / "worker").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", pytest.param("fork", marks=pytest.mark.failures)])
def test_a_run_that_is_killed_in_an_epoch_ends_as_if_never_killed(
    tmp_path: Path, start: str
) -> None:
    whole = run(tmp_path / "whole", loader={"workers": 0})
    loader = {"workers": 3, "start": start}
    found = run(tmp_path / "killed", flags=("kills_rank",), loader=loader, max_restarts=1)
    assert len(found.restarts) == 1
    assert not is_alive(worker_of(tmp_path / "killed"))
    assert_same(found, whole)
    alone = run(tmp_path / "alone", loader={"workers": 1}, replicas=1)
    np.testing.assert_allclose(alone.history.loss, whole.history.loss, 1e-12)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("raises", ["raised ValueError: this image is broken", f"for sample {FATAL} of the data"]),
        ("killed", ["was ended by SIGKILL", "it was making samples"]),
        pytest.param(
            "hangs",
            ["has not answered for 13.5 s", "it was making samples"],
            marks=pytest.mark.failures,
        ),
    ],
)
def test_a_worker_that_fails_ends_the_run(tmp_path: Path, flag: str, expected: list[str]) -> None:
    folder = tmp_path / "run"
    changes = {"timeouts": {"progress": 15.0}} if flag == "hangs" else {}
    with pytest.raises(RunFailedError) as raised:
        run(folder, flags=(flag,), **changes)
    for text in ("raised DataError", "worker process ", f"pid {worker_of(folder)}", *expected):
        assert text in str(raised.value)
    if flag == "raises":
        assert 'raise ValueError("this image is broken")' in str(raised.value)
    if flag == "hangs":
        assert any("in hangs" in log.read_text() for log in folder.glob("rank-*.log"))
    assert not is_alive(worker_of(folder))


def test_data_that_cannot_be_pickled_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"data\.lock cannot be sent to the worker.*fork"):
        run(tmp_path / "run", data=unpicklable)
    run(tmp_path / "forked", data=unpicklable, loader={"workers": 1, "start": "fork"})


def unpicklable(folder: str) -> Samples:
    made = Samples(folder)
    made.lock = threading.Lock()  # type: ignore[attr-defined]
    return made


def rows(folder: str) -> Any:
    return np.zeros((SAMPLES, 4)), np.zeros(SAMPLES, int)


def sharding(folder: str) -> Any:
    return Sharding()


def batches(folder: str) -> Any:
    return isotrain.sources.stream(lambda: iter([rows(folder)]), SAMPLES)


@pytest.mark.parametrize(
    ("data", "count", "expected"),
    [
        (samples, 1, "loader: 1 worker process on each host for the training data"),
        (
            batches,
            1,
            "loader: one process on each host reads the training data for all replicas there",
        ),
        (sharding, 1, "loader.workers: not used, as the training data shard themselves"),
        (rows, 2, "loader.workers: not used, as rows of arrays in memory are copied faster"),
        (rows, 0, None),
    ],
)
def test_the_plan_tells_of_workers(
    tmp_path: Path, data: Any, count: int, expected: str | None
) -> None:
    changes: dict[str, Any] = {"steps": 1, "epochs": None, "global_batch_size": 6}
    run(tmp_path / "run", data=data, loader={"workers": count}, **changes)
    notes = json.loads((tmp_path / "run/plan.json").read_text())["notes"]
    assert [note for note in notes if note.startswith("loader")] == ([expected] if expected else [])


PROGRAM = """
import os, sys, time
import isotrain
from integration.resume_runs import plain
from integration.test_worker_failures import Samples

class Slow(Samples):
    def __getitem__(self, index):
        (self.folder / f"{os.getpid()}.pid").touch()
        time.sleep(0.1)
        return super().__getitem__(index)

if __name__ == "__main__":
    isotrain.run(
        {
            "model": {"numpy": plain}, "data": Slow(sys.argv[1]), "global_batch_size": 7,
            "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
            "optimizer": {"name": "sgd", "lr": 0.1}, "steps": 1000, "loader": {"workers": 2},
            "plugins": "isotrain.testing.reference",
        },
        backend="reference", replicas=2, output=sys.argv[1] + "/run",
    )
"""


@pytest.mark.slow
@pytest.mark.failures
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_program(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches the program and its workers, as in a terminal; SIGKILL the program alone."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    starter = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )

    def workers() -> list[int]:
        return [int(path.stem) for path in tmp_path.glob("*.pid")]

    with starter:
        wait_until(lambda: len(workers()) == 2 or starter.poll() is not None, 120)
        assert starter.poll() is None, starter.stderr and starter.stderr.read()
        for pid in [*workers(), starter.pid] if number == signal.SIGINT else [starter.pid]:
            os.kill(pid, number)
        starter.communicate(timeout=60)
    wait_until(lambda: not any(is_alive(pid) for pid in workers()), 60)
