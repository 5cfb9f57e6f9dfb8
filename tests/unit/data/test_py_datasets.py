"""Batches of a Keras `PyDataset`, made by threads or by processes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.leftover_processes import is_alive
from helpers.waiting import wait_until
from unit.data.py_datasets import Large, Pids, Processes, PyDataset, Threaded
from unit.data.stream_samples import given_by, loader

from isotrain.core.data.loader import Loader
from isotrain.core.data.sources import as_source, stream
from isotrain.core.data.streaming.py_dataset import PyDatasetReader
from isotrain.core.data.streaming.streams import BatchStream, reader
from isotrain.core.errors import DataError, IsotrainError

open_loaders: list[Loader] = []


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    yield
    while open_loaders:
        open_loaders.pop().close()


def made(dataset: Any, **options: Any) -> Loader:
    source = as_source(dataset)
    open_loaders.append(loader(source, global_batch_size=4, **options))
    return open_loaders[-1]


def test_threads_keep_the_order() -> None:
    assert given_by(as_source(Threaded())) == given_by(as_source(PyDataset()))
    with pytest.raises(RuntimeError, match="a broken batch"):
        given_by(as_source(Threaded(failing=4)))


@pytest.mark.parametrize("count", [3, None])
def test_a_data_set_ends_after_its_number_of_batches(count: int | None) -> None:
    class Counted(PyDataset):
        num_batches = count

    read = reader(Counted())
    assert read is not None
    assert len([*itertools.islice(read(), 9)]) == (count or 9)


def epochs_of(batches: Loader, part: str) -> list[list[Any]]:
    """Inputs or targets of all samples, by epoch."""
    epochs: dict[int, list[Any]] = {}
    for batch in batches:
        rows = getattr(batch.slices[0][0], part).tolist()
        epochs.setdefault(batch.epoch, []).extend(rows)
    return list(epochs.values())


def test_processes_see_each_shuffle_of_the_one_data_set() -> None:
    dataset = Processes()
    first, *others = epochs_of(made(dataset, epochs=3), "targets")
    assert first == list(range(20))
    assert [sorted(each) for each in others] == [first, first]
    assert len({str(each) for each in (first, *others)}) == 3


def test_processes_stay_for_the_next_epoch_and_end_with_the_loader() -> None:
    batches = made(Pids(2), epochs=2)
    pids = [set(epoch) for epoch in epochs_of(batches, "targets")]
    assert len(pids[0]) == 2
    assert pids[0] == pids[1]
    assert os.getpid() not in pids[0]
    batches.close()
    assert not any(is_alive(pid) for pid in pids[0])


@pytest.mark.slow
def test_draws_do_not_depend_on_the_number_of_processes() -> None:
    one, three = (epochs_of(made(Pids(workers), epochs=2), "inputs") for workers in (1, 3))
    assert one == three
    numbers = [number for epoch in one for row in epoch for number in row]
    assert len(set(numbers)) == len(numbers) == 2 * 20 * 2


@pytest.mark.slow
def test_draws_depend_on_the_seed() -> None:
    def drawn(seed: int) -> Any:
        source = as_source(Pids(2))
        assert isinstance(source, BatchStream)
        source.set_up_processes(seed, 300.0)
        return epochs_of(made(source, epochs=2), "inputs")

    assert drawn(1) == drawn(1)
    assert not set(np.ravel(drawn(1))) & set(np.ravel(drawn(2)))


def test_a_large_array_is_sent_anew() -> None:
    zeros, ones = epochs_of(made(Large(), epochs=2), "inputs")
    assert (set(zeros), set(ones)) == ({0.0}, {1.0})


def test_an_epoch_that_is_left_early() -> None:
    batches = made(stream(Pids(2), samples=20), epochs=2)  # no epoch is read to count them
    iterator = iter(batches)
    (pid, *_) = next(iterator).slices[0][0].targets.tolist()
    iterator.close()
    assert not is_alive(pid)
    assert len(list(batches)) == 10


@pytest.mark.slow
def test_epochs_that_are_read_beside_each_other() -> None:
    """As in a loop that is left and begun again, whose first iterator is still there."""
    read = reader(Pids(2))
    assert read is not None
    left, whole = read(), read()
    left_pid, pid = (int(next(each)[1][0]) for each in (left, whole))
    assert pid != left_pid
    first = next(left)[1]
    del left
    assert not is_alive(left_pid)
    numbers = [batch[0] for batch in whole]
    assert len(numbers) == 4
    assert is_alive(pid), "it stays for the next epoch"
    assert first.shape == numbers[0].shape[:1]
    assert {int(each) for batch in read() for each in batch[1]} >= {pid}
    read.close()
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", r"a process that makes batches raised RuntimeError: a broken batch\n(.*\n)+.*"),
        ("killed", r"process 0 of 3 \(pid \d+\), which was to make batch 3 .* ended by SIGKILL"),
    ],
)
def test_a_process_that_fails_is_told(fault: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        list(made(Processes(fault=fault)))


def test_a_process_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # it ends after it was asked for its stack: it is not killed before
    monkeypatch.setattr("isotrain.core.data.processes.child_process._END_SECONDS", 60.0)
    file = tmp_path / "waits"
    read = reader(Processes(fault="waits", file=str(file)))
    assert isinstance(read, PyDatasetReader)
    batches = read()
    for _ in range(3):
        next(batches)
    wait_until(file.exists, 60)
    read.timeout = 0.0
    name = r"process 0 of 3 \(pid \d+\), which was to make batch 3 of a PyDataset, has not answered for 0 s"
    with pytest.raises(DataError, match=name):
        next(batches)
    assert not file.exists()


def test_a_data_set_that_cannot_be_sent_is_refused() -> None:
    dataset = Processes()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(IsotrainError, match=r"data\.lock cannot be sent.*use_multiprocessing"):
        list(made(dataset))


def test_the_reader_of_a_host_has_processes(connect: Any) -> None:
    (stream,) = connect(processes)
    targets = [n for batch in loader(stream, epochs=2) for n in batch.slices[0][0].targets.tolist()]
    assert targets[:20] == list(range(20))
    assert sorted(targets[20:]) == list(range(20))
    assert np.any(np.diff(targets[20:]) != 1)


def processes() -> dict[str, Any]:
    return {"train": as_source(Processes(2))}
