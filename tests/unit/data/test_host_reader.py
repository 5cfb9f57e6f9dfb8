"""The reader of a host, as a real process: read once, the same batches, and what happens when it fails."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.leftover_processes import is_alive
from helpers.waiting import wait_until
from unit.data import reader_programs
from unit.data.stream_samples import INPUTS, kept, loader

from isotrain.core.data.host_reader.host_reader import HostReader, SharedStream
from isotrain.core.data.workers.child_process import ChildProcess
from isotrain.core.errors import DataError, PeerLostError

Connect = Callable[..., list[SharedStream]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Starts a reader, and gives the streams of so many "processes" of its host."""
    readers: list[HostReader] = []

    def connect(load: Callable[[], Any], processes: int = 1) -> list[SharedStream]:
        token = secrets.token_hex(8)
        limits = {"start_seconds": 60.0, "timeout": 300.0}
        made = [HostReader(token, processes, **limits) for _ in range(processes)]
        made[0].start(load)
        readers.extend(made)
        return [SharedStream("train", each) for each in made]

    yield connect
    for each in readers:
        each.close()


def targets_of(batch: Any) -> Any:
    return [[(p.targets["class"].tolist(), p.count) for p in local] for local in batch.slices]


def together(work: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions that run at the same time, as processes of a host do.

    All threads live before one ends, so that none gets the identifier of another.
    """
    results: list[Any] = [None] * len(work)
    all_live = threading.Barrier(len(work))

    def run(number: int) -> None:
        all_live.wait()
        results[number] = work[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def batches_of(stream: Any, replica: int, replicas: int, **options: Any) -> list[Any]:
    from isotrain.core.data.loader import Loader

    chosen = {"global_batch_size": 6, "seed": 0, "drop_remainder": False, "epochs": 2} | options
    start = chosen.pop("start", (0, None))
    made = Loader(stream, replicas=replicas, local_replicas=[replica], **chosen)
    return list(made.from_step(*start))


@pytest.fixture(autouse=True)
def separate_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for processes, which the reader tells apart by their ids."""
    monkeypatch.setattr("isotrain.core.data.host_reader.host_reader.os.getpid", threading.get_ident)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("samples", [20, None])
def test_a_stream_is_read_once_for_all_processes(
    connect: Connect, processes: int, samples: int | None, tmp_path: Path
) -> None:
    file, alone = tmp_path / "read", tmp_path / "alone"
    streams = connect(functools.partial(reader_programs.noting, str(file), samples), processes)
    shared = together(
        [
            functools.partial(batches_of, stream, replica, processes)
            for replica, stream in enumerate(streams)
        ]
    )
    rows = [int(row) for row in file.read_text().split()]
    assert rows == [*range(20), *range(20)]
    (plain,) = reader_programs.noting(str(alone)).values()
    for replica in range(processes):
        expected = batches_of(plain, replica, processes)
        assert [*map(facts_of, shared[replica])] == [*map(facts_of, expected)]
        assert [each.fingerprint for each in shared[replica]] == [
            each.fingerprint for each in expected
        ]


def facts_of(batch: Any) -> Any:
    return batch.epoch, batch.index, batch.step, batch.size, batch.even, targets_of(batch)


def test_resuming_by_its_state_with_another_number_of_processes(
    connect: Connect, tmp_path: Path
) -> None:
    first = connect(functools.partial(reader_programs.noting, str(tmp_path / "first")), 2)
    options = {"epochs": None, "steps": 12, "epoch_steps": 5, "state_seconds": 0.0}
    whole = together(
        [functools.partial(batches_of, each, i, 2, **options) for i, each in enumerate(first)]
    )
    state = kept(whole[0][6].stream_state)
    assert state is not None
    assert state == kept(whole[1][6].stream_state)
    (again,) = connect(functools.partial(reader_programs.noting, str(tmp_path / "second")))
    rest = batches_of(again, 0, 1, start=(7, state), **options)
    joined = [
        [
            row
            for batch in pair
            for local in batch.slices
            for p in local
            for row in p.targets["class"]
        ]
        for pair in zip(*whole, strict=True)
    ]
    assert [[*batch.slices[0][0].targets["class"]] for batch in rest] == joined[7:]
    assert len((tmp_path / "second").read_text().split()) <= 5 * 6 + 3 + 2 * 6


def test_readings_start_anew_and_are_given_up_in_between(connect: Connect, tmp_path: Path) -> None:
    (stream,) = connect(functools.partial(reader_programs.noting, str(tmp_path / "read")))
    made = loader(stream, global_batch_size=6, epochs=2)
    for start in (0, 3, 1, 3):
        batches = made.from_step(start)
        first = next(batches)
        assert first.step == start
        assert first.slices[0][0].targets["class"][0] == start % 4 * 6
        batches.close()


def test_arrays_stay_valid_after_the_next_batches(connect: Connect, tmp_path: Path) -> None:
    (stream,) = connect(functools.partial(reader_programs.noting, str(tmp_path / "read")))
    batches = list(loader(stream, global_batch_size=4, epochs=2, prefetch=2))
    inputs = [row for batch in batches for row in batch.slices[0][0].inputs.tolist()]
    assert inputs == [*INPUTS.tolist(), *INPUTS.tolist()]


def test_variables_of_ranks_do_not_reach_the_stream(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (stream,) = connect(functools.partial(reader_programs.named, "ranks"))
    (batch,) = loader(stream, epochs=None, steps=1, epoch_steps=1)
    assert batch.slices[0][0].inputs.max() == 0


def test_an_error_of_the_stream_comes_with_its_traceback(connect: Connect) -> None:
    streams = connect(functools.partial(reader_programs.named, "raising"), 2)
    for stream in streams:
        batches = iter(loader(stream))
        assert next(batches).size == 8
        with pytest.raises(
            DataError, match=r"raised RuntimeError: a broken shard\n(.*\n)+.*in raising"
        ):
            next(batches)


def test_an_error_while_loading_is_told(connect: Connect) -> None:
    (stream,) = connect(reader_programs.unloadable)
    with pytest.raises(DataError, match="FileNotFoundError: no such shard"):
        len(stream)


def test_a_killed_reader_is_named(connect: Connect) -> None:
    streams = connect(functools.partial(reader_programs.named, "killed"), 2)

    def failed(stream: SharedStream) -> Exception:
        with pytest.raises((DataError, PeerLostError)) as raised:
            list(loader(stream))
        return raised.value

    first, second = together([functools.partial(failed, stream) for stream in streams])
    assert "reads the stream was ended by SIGKILL" in str(first)
    ends = {DataError: "was ended by SIGKILL", PeerLostError: "has ended"}
    assert f"reads the stream {ends[type(second)]}" in str(second)


def test_nothing_is_left_of_a_stuck_reader_whose_starter_is_killed() -> None:
    parent = ChildProcess.spawn("unit.data.reader_programs:starter_of_stuck", {})
    message = parent.channel.receive()
    assert message is not None
    reader = message.header["pid"]
    assert is_alive(reader)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(reader), 60.0)
    assert "SIGKILL" in parent.describe_end()


def test_data_that_cannot_be_pickled_are_refused(connect: Connect) -> None:
    lock = threading.Lock()
    with pytest.raises(DataError, match="Give a function that makes the data"):
        connect(lambda: lock)
