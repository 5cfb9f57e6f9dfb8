"""The reader of a host, as a real process: read once, the same batches, and what happens when it fails."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from helpers.leftover_processes import is_alive
from helpers.waiting import wait_until
from unit.data import reader_programs
from unit.data.stream_samples import INPUTS, kept, loader

from isotrain.core.data import sources
from isotrain.core.data.host_reader.host_reader import HostReader, SharedStream
from isotrain.core.data.host_reader.shard_processes import ShardProcesses
from isotrain.core.data.processes.child_process import ChildProcess, close_all
from isotrain.core.data.sources import sample_stream
from isotrain.core.data.streaming.shards import ShardedSamples
from isotrain.core.data.streaming.stream_state import from_json
from isotrain.core.errors import DataError, PeerLostError

Connect = Callable[..., list[SharedStream]]


def slow(*values: Any) -> Any:
    """A case that the everyday tests leave out: each starts processes of its own."""
    return pytest.param(*values, marks=pytest.mark.slow)


def failure(*values: Any) -> Any:
    """A case of `make test-failures`."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.failures])


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


@pytest.mark.parametrize(("samples", "processes"), [(20, 3), slow(None, 2)])
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_readings_start_anew_and_are_given_up_in_between(connect: Connect, tmp_path: Path) -> None:
    (stream,) = connect(functools.partial(reader_programs.noting, str(tmp_path / "read")))
    made = loader(stream, global_batch_size=6, epochs=2)
    for start in (0, 3, 1, 3):
        batches = made.from_step(start)
        first = next(batches)
        assert first.step == start
        assert first.slices[0][0].targets["class"][0] == start % 4 * 6
        batches.close()


@pytest.mark.slow
def test_arrays_stay_valid_after_the_next_batches(connect: Connect, tmp_path: Path) -> None:
    (stream,) = connect(functools.partial(reader_programs.noting, str(tmp_path / "read")))
    batches = list(loader(stream, global_batch_size=4, epochs=2, prefetch=2))
    inputs = [row for batch in batches for row in batch.slices[0][0].inputs.tolist()]
    assert inputs == [*INPUTS.tolist(), *INPUTS.tolist()]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.failures
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


def test_a_reader_may_end_once_it_has_given_all_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("isotrain.core.data.host_reader.host_reader.BATCHES_AHEAD", 1)
    limits, token = {"start_seconds": 60.0, "timeout": 300.0}, secrets.token_hex(8)
    starter, other = (HostReader(token, 2, range(2), **limits) for _ in range(2))
    with contextlib.closing(starter):
        starter.start(functools.partial(reader_programs.noting, str(tmp_path / "read")))
        stream = SharedStream("train", other)
        batches = iter(loader(stream, epochs=None, steps=3, epoch_steps=3))
        assert [next(batches).step for _ in range(3)] == [0, 1, 2]
    assert next(batches, None) is None


@pytest.mark.slow
@pytest.mark.failures
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


def numbers_of(batches: Any) -> list[int]:
    return [n for batch in batches for local in batch.slices for p in local for n in targets(p)]


def targets(part: Any) -> list[int]:
    rows: list[int] = part.targets.tolist()[: part.count]
    assert part.inputs[: part.count, -1].tolist() == rows
    return rows


def in_turn() -> list[int]:
    """One number of each shard in turn, without those that have ended."""
    shards = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(reader_programs.COUNTS)]
    return [shard[row] for row in range(40) for shard in shards if row < len(shard)]


SHARDED = {"global_batch_size": 9, "state_seconds": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes", "shard_processes"),
    [("asking", 2, 3), slow("function", 1, 5)],
)
def test_samples_of_shards_come_in_turn_by_any_number_of_readers(
    connect: Connect, kind: str, processes: int, shard_processes: int
) -> None:
    load = functools.partial(reader_programs.counted, kind)
    streams = connect(load, processes, shard_processes)
    shared = together(
        [
            functools.partial(batches_of, each, replica, processes, **SHARDED)
            for replica, each in enumerate(streams)
        ]
    )
    joined = [numbers_of(batches) for batches in zip(*shared, strict=True)]
    assert [n for batch in joined for n in batch] == in_turn() * 2
    (here,) = load().values()
    assert numbers_of(batches_of(here, 0, 1, **SHARDED)) == in_turn() * 2


def test_batches_of_shards_come_in_turn_by_any_number_of_readers(connect: Connect) -> None:
    (here,) = reader_programs.batched().values()
    (shared,) = connect(reader_programs.batched, shard_processes=2)
    shards = [[batch.tolist() for _, batch in shard] for shard in batches_by_shard()]
    in_turn = [shard[row] for row in range(10) for shard in shards if row < len(shard)]
    numbers = [number for batch in in_turn for number in batch]
    assert len(numbers) == sum(reader_programs.COUNTS)
    assert numbers_of(batches_of(here, 0, 1, **SHARDED)) == numbers * 2
    whole = batches_of(shared, 0, 1, **SHARDED)
    assert numbers_of(whole) == numbers * 2
    rest = batches_of(shared, 0, 1, start=(13, None), **SHARDED)
    assert numbers_of(rest) == numbers_of(whole[13:])


def batches_by_shard() -> list[list[Any]]:
    """The batches of each shard."""
    count = len(reader_programs.COUNTS)
    return [list(reader_programs.batched_shard(shard, count)) for shard in range(count)]


@pytest.mark.slow
def test_shards_resume_by_their_states_with_another_number_of_readers(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotrain.core.data.streaming.shards._STATE_SECONDS", 0.0)
    load = functools.partial(reader_programs.counted, "asking")
    (here,) = load().values()
    whole = batches_of(here, 0, 1, **SHARDED)
    (stream,) = connect(load, shard_processes=2)
    for step in (4, 8, 13):
        state = kept(whole[step - 1].stream_state)
        assert state is not None
        assert state.epoch == (step - 1) // 9
        assert max(since for _, since in from_json(state.state)["starts"]) <= 16
        rest = batches_of(stream, 0, 1, start=(step, state), **SHARDED)
        assert numbers_of(rest) == numbers_of(whole[step:])
    other = sample_stream(lambda shard, shards: iter(range(9)), samples=77, shards=2)
    with pytest.raises(DataError, match="3 shards when the checkpoint was saved, and now in 2"):
        batches_of(other, 0, 1, start=(step, state), **SHARDED)


@pytest.mark.slow
def test_shards_may_be_more_than_a_socket_holds_messages(connect: Connect) -> None:
    (stream,) = connect(reader_programs.many, shard_processes=2)
    made = loader(stream, global_batch_size=50, epochs=2)
    abandoned = made.from_step(0)
    next(abandoned)
    abandoned.close()  # while the processes read ahead
    assert numbers_of(made) == list(range(3 * reader_programs.MANY)) * 2


@pytest.mark.parametrize(("shards", "processes", "size"), [(3, 1, 16), (1024, 4, 2), (1024, 1, 1)])
def test_many_shards_are_read_in_smaller_chunks(shards: int, processes: int, size: int) -> None:
    samples = ShardedSamples(lambda shard, shards: iter(range(100)), shards)
    reader = samples.reader(0, processes)
    reader.begin(None, 0)
    assert [len(reader.chunk().samples) for _ in range(3)] == [1, size, size]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("killed", "the process that reads shard 1 of the stream was ended by SIGKILL"),
        failure("raising", r"raised RuntimeError: a broken shard\n(.*\n)+.*in raising_shard"),
        failure("deaf", "CountedShards does not ask torch's get_worker_info for its shard"),
    ],
)
def test_the_failure_of_a_reader_of_shards_is_told(connect: Connect, kind: str, end: str) -> None:
    (stream,) = connect(functools.partial(reader_programs.counted, kind), shard_processes=3)
    with pytest.raises(DataError, match=end):
        batches_of(stream, 0, 1, **SHARDED)


@pytest.mark.slow
@pytest.mark.failures
def test_a_process_of_shards_that_hangs_is_named_with_its_stack(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pickled = cloudpickle.dumps(functools.partial(reader_programs.counted, "hanging"))
    processes = ShardProcesses(pickled, "train", 2)
    try:
        processes.begin(0, (None, 0))
        processes.begin(1, (None, 0))
        assert len(processes.chunk(1).samples) == 1
        log: list[str] = []

        def wait_for_log(text: str) -> None:
            wait_until(
                lambda: log.append(capfd.readouterr().err) or text in "".join(log), 60.0, text
            )

        wait_for_log("shard 1 hangs")  # a signal that comes sooner shows another stack
        processes.timeout = 1.0
        with pytest.raises(
            DataError, match=r"reads shard 1 of the stream \(pid \d+\) has not answered"
        ):
            processes.chunk(1)
        wait_for_log("in hanging_shard")
    finally:
        close_all(each.child for each in processes.children)


def test_a_reading_that_another_one_has_taken_over_is_no_shorter_epoch() -> None:
    samples = ShardedSamples(lambda shard, shards: iter(range(shard, 200, shards)), 2)
    first = iter(samples)
    assert [next(first) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert list(samples) == list(range(200))
    with pytest.raises(DataError, match="read again before this reading of it had ended"):
        next(first)
    assert list(samples) == list(range(200))


def test_streams_that_cannot_be_told_a_shard_are_refused() -> None:
    for make in (sources.stream, sample_stream):
        with pytest.raises(DataError, match="list cannot be told a shard"):
            make([1, 2], shards=2)
    with pytest.raises(DataError, match="shards: expected at least 1, received 0"):
        sample_stream(reader_programs.counted_shard, shards=0)
