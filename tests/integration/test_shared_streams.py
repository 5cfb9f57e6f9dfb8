"""Streams that one process of each host reads for all processes of a run there."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param
from helpers.leftover_processes import is_alive
from helpers.waiting import wait_until

import isotrain

pytestmark = pytest.mark.features

SAMPLES = 23
INPUTS = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
TARGETS = INPUTS.sum(1, keepdims=True)


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def noted(folder: str) -> isotrain.DataSet:
    """Training and validation streams, which note their samples and the process that reads them."""

    def read(name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, SAMPLES, 5):
            rows = range(start, min(SAMPLES, start + 5))
            with (Path(folder) / name).open("a") as file:
                file.writelines(f"{os.getpid()} {row}\n" for row in rows)
            yield INPUTS[rows.start : rows.stop], TARGETS[rows.start : rows.stop]

    return isotrain.DataSet(lambda: read("train"), lambda: read("validation"))


def broken(folder: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield INPUTS[:16], TARGETS[:16]
    raise RuntimeError("a broken shard")


def killed(folder: str) -> Any:
    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(4):
            yield INPUTS[:16], TARGETS[:16]
        os.kill(os.getpid(), signal.SIGKILL)

    return isotrain.sources.stream(read, 1000)


def stuck(folder: str) -> Any:
    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        server = socket.create_server(("127.0.0.1", 0))
        with socket.create_connection(server.getsockname()) as connection:
            yield INPUTS[:16], TARGETS[:16]
            (Path(folder) / "reader").write_text(str(os.getpid()))
            connection.recv(1)  # from a server that never answers

    return isotrain.sources.stream(read, 1000)


def spec(data: Any, folder: Path, **fields: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {
        "model": model,
        "data": data,
        "data_args": {"folder": str(folder)},
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "global_batch_size": 8,
        "epochs": 2,
        "capture": False,
        "device": "cpu",
        "threads": 1,
        "loader": {"workers": 1},
        **fields,
    }


def run(given: dict[str, Any], backend: str, replicas: int, folder: Path, **options: Any) -> Any:
    options = {"on_event": lambda _: None, **options}
    return isotrain.run(given, backend=backend, replicas=replicas, output=folder, **options)


def read(file: Path) -> tuple[set[int], list[int]]:
    """The processes that read a stream, and the samples."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return {int(pid) for pid, _ in lines}, [int(row) for _, row in lines]


@pytest.mark.parametrize(
    ("backend", "replicas"),
    [
        param("torch-ddp", 3),
        param("tf-multiworker", 2),
        param("tf-mirrored", 2),
        param("horovod-torch", 2),
    ],
)
def test_a_stream_is_read_once(backend: str, replicas: int, tmp_path: Path) -> None:
    shared = run(spec(noted, tmp_path / "read"), backend, replicas, tmp_path / "shared")
    alone = spec(noted, tmp_path / "alone", loader={})
    plain = run(alone, backend, replicas, tmp_path / "plain")
    assert shared.history.loss == plain.history.loss
    assert shared.metrics == plain.metrics
    size = 4 * (4 + 1)
    (counted,) = shared.data_read.values()
    assert counted == {"samples": 2 * SAMPLES, "bytes": 2 * SAMPLES * size}
    readers = 1 if backend == "tf-mirrored" else replicas
    (counted,) = plain.data_read.values()
    assert counted["samples"] == 2 * SAMPLES * readers
    processes, rows = read(tmp_path / "read" / "train")
    (reader,) = processes
    assert rows == [*range(SAMPLES)] * 2
    assert len(read(tmp_path / "read" / "validation")[0]) == 1
    assert not is_alive(reader)


def test_a_coordinator_reads_for_its_workers(tmp_path: Path) -> None:
    given = spec(noted, tmp_path / "read", strategy="parameter-server")
    result = run(given, "torch-ddp", 2, tmp_path / "run")
    (counted,) = result.data_read.values()
    assert counted["samples"] == 2 * SAMPLES


class Stateful:
    """Endless batches of 5 samples, which go on from a state; the position is noted at each start."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "starts"
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with self.file.open("a") as file:
            file.write(f"{self.position}\n")
        while True:
            inputs = np.random.default_rng(self.position).standard_normal((5, 4))
            self.position += 1
            yield inputs, inputs.sum(1, keepdims=True)


def stateful(folder: str) -> Any:
    return isotrain.sources.stream(Stateful(folder))


def test_a_run_resumes_in_mid_epoch_with_another_number_of_replicas(tmp_path: Path) -> None:
    fields = {"epochs": None, "epoch_steps": 5, "checkpoint": {"every_steps": 1}}
    fields |= {"precision": "float64", "steps": 12}
    given = spec(stateful, tmp_path / "read", **fields)
    whole = run(given, "torch-ddp", 2, tmp_path / "whole")
    folder = tmp_path / "part"
    run({**given, "steps": 7}, "torch-ddp", 2, folder)
    rest = run(given, "torch-ddp", 3, folder, resume="auto")
    np.testing.assert_allclose(rest.history.loss, whole.history.loss, rtol=1e-12)
    starts = [int(line) for line in (tmp_path / "read" / "starts").read_text().split()]
    assert starts[:2] == [0, 0]
    assert len(starts) == 3
    assert 0 < starts[2] <= 11  # of 56 samples, read at most once a second


class Killing(Stateful):
    """The same, which kill the process that trains when they are read for the first time."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        flag = self.file.with_name("kills")
        for number, batch in enumerate(super().__iter__()):
            if number == 40 and flag.exists():
                flag.unlink()
                os.kill(os.getppid(), signal.SIGKILL)
            yield batch


def killing(folder: str) -> Any:
    return isotrain.sources.stream(Killing(folder))


@functools.cache
def losses_without_a_kill() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        given = spec(killing, Path(folder, "read"), **ENDLESS)
        return run(given, "torch-ddp", 1, Path(folder, "run")).history.loss


ENDLESS = {"epochs": None, "epoch_steps": 7, "steps": 30, "precision": "float64"}


@pytest.mark.failures
@pytest.mark.parametrize(
    ("backend", "replicas"),
    [
        param("torch-ddp", 2),
        param("tf-mirrored", 2),
        param("tf-multiworker", 2),
        param("horovod-torch", 2),
        param("horovod-tf", 2),
    ],
)
def test_a_run_on_an_endless_stream_that_is_killed_ends_as_if_never_killed(
    backend: str, replicas: int, tmp_path: Path
) -> None:
    """The process is killed when batch 40 is read, which is of step 25, and a few are read ahead."""
    given = spec(killing, tmp_path / "read", checkpoint={"every_steps": 1}, **ENDLESS)
    (tmp_path / "read" / "kills").touch()
    result = run(given, backend, replicas, tmp_path / "run", max_restarts=1)
    (restart,) = result.restarts
    assert restart["from_step"] > 0
    assert not (tmp_path / "read" / "kills").exists()
    assert [len(result.history.loss), len(result.history.epochs)] == [30, 5]
    np.testing.assert_allclose(result.history.loss, losses_without_a_kill(), rtol=1e-12)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (broken, r"raised RuntimeError: a broken shard"),
        (killed, r"the process that reads the stream was ended by SIGKILL"),
    ],
)
def test_a_failing_reader_ends_the_run(data: Any, text: str, tmp_path: Path) -> None:
    given = spec(data, tmp_path / "read", epochs=None, steps=50, epoch_steps=10)
    with pytest.raises(isotrain.IsotrainError, match=text):
        run(given, "torch-ddp", 2, tmp_path / "run")


def test_a_reader_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    fields = {"steps": 50, "epochs": None, "epoch_steps": 10}
    given = spec(stuck, tmp_path / "read", timeouts={"progress": 10.0}, **fields)
    with pytest.raises(isotrain.IsotrainError) as raised:
        run(given, "torch-ddp", 2, tmp_path / "run")
    pid = int((tmp_path / "read" / "reader").read_text())
    end = f"reads the stream (pid {pid}) has not answered for 9 s (0.9 of timeouts.progress)"
    assert end in str(raised.value)
    wait_until(lambda: not is_alive(pid), 60.0)
    log = (tmp_path / "run" / "rank-0.log").read_text()
    assert re.search(r"test_shared_streams\.py., line \d+ in read", log)


def shard_of_rows(shard: int, shards: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield from zip(INPUTS[shard::shards], TARGETS[shard::shards], strict=True)


def in_shards(folder: str) -> Any:
    return isotrain.sources.sample_stream(shard_of_rows, samples=SAMPLES, shards=3)


def in_shards_of_known_lengths(folder: str) -> Any:
    lengths = [len(TARGETS[shard::3]) for shard in range(3)]
    return isotrain.sources.sample_stream(shard_of_rows, samples=lengths)


def in_shards_of_tensorflow(folder: str) -> Any:
    import tensorflow as tf

    def batches(shard: int, shards: int) -> Any:
        rows = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS))
        return rows.shard(shards, shard).batch(5)

    return isotrain.sources.stream(batches, SAMPLES, shards=3)


IN_SHARDS = {
    "samples": in_shards,
    "known-lengths": in_shards_of_known_lengths,
    "tensorflow": in_shards_of_tensorflow,
}


@pytest.mark.parametrize(
    ("backend", "replicas", "kind"),
    [
        param("torch-ddp", 2, "samples"),
        param("torch-ddp", 2, "known-lengths"),
        param("tf-mirrored", 2, "samples"),
        param("tf-mirrored", 2, "known-lengths"),
        param("horovod-tf", 2, "tensorflow"),
    ],
)
def test_several_workers_read_the_shards_of_a_stream(
    backend: str, replicas: int, kind: str, tmp_path: Path
) -> None:
    data = IN_SHARDS[kind]
    fields = {"precision": "float64", "loader": {"workers": 2}}
    given = spec(data, tmp_path / "read", **fields)
    several = run(given, backend, replicas, tmp_path / "several")
    assert "loader: 2 processes on each host read the training data" in str(several.plan["notes"])
    (counted,) = several.data_read.values()
    assert counted["samples"] == 2 * SAMPLES
    alone = run({**given, "loader": {}}, backend, 1, tmp_path / "alone")
    np.testing.assert_allclose(several.history.loss, alone.history.loss, rtol=1e-12)
