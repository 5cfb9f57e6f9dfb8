"""Shards of known lengths: their schedule, what each process reads of them, and resuming."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.data import reader_programs
from unit.data.stream_samples import kept

from isotrain.core.data.collate import Padding
from isotrain.core.data.loader import Loader
from isotrain.core.data.sources import sample_stream
from isotrain.core.data.streaming.scheduled_shards import ShardSchedule, joined_states
from isotrain.core.data.streaming.stream_epoch import ReadCount
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.errors import DataError

LENGTHS = (40, 7, 30)
PLAIN: dict[str, Any] = {"global_batch_size": 8, "seed": 0, "drop_remainder": False, "epochs": 2}


@pytest.mark.parametrize(
    "lengths", [LENGTHS, (5, 5, 5), (1,), (0, 3, 1), (10**12, 10**12), (1, 10**6)]
)
def test_shards_keep_their_proportions(lengths: Sequence[int]) -> None:
    schedule, total = ShardSchedule(lengths), sum(lengths)
    before = np.zeros(len(lengths), np.int64)
    for samples in range(min(2 * total, 400) + 1):
        counts = schedule.counts(samples)
        assert counts.sum() == samples
        assert (counts >= before).all()
        assert (np.abs(counts - samples * np.array(lengths) / total) <= 1).all()
        before = counts
    assert schedule.counts(total).tolist() == list(lengths)
    assert schedule.counts(3 * total).tolist() == [3 * each for each in lengths]


@pytest.mark.parametrize("lengths", [LENGTHS, (0, 3, 1), (6, 10, 15), tuple(range(20))])
def test_samples_are_due_in_the_middle_of_their_parts_of_an_epoch(lengths: Sequence[int]) -> None:
    due = [(Fraction(2 * i + 1, 2 * n), shard) for shard, n in enumerate(lengths) for i in range(n)]
    shards = [shard for _, shard in sorted(due)]
    schedule = ShardSchedule(lengths)
    for samples in range(len(shards) + 1):
        expected = np.bincount(shards[:samples], minlength=len(lengths))
        assert schedule.counts(samples).tolist() == expected.tolist()


def test_shards_of_one_length_come_in_turn() -> None:
    schedule = ShardSchedule([5, 5, 5])
    counts = [schedule.counts(samples) for samples in range(16)]
    shards = [int(np.argmax(after - before)) for before, after in itertools.pairwise(counts)]
    assert shards == [0, 1, 2] * 5


def shards_of(
    lengths: Sequence[int], opened: list[int] | None = None, **options: Any
) -> BatchStream:
    """A stream whose samples are 1000 times the shard, plus the position in it."""

    def shard(index: int, shards: int) -> Iterator[Any]:
        if opened is not None:
            opened.append(index)
        for position in range(lengths[index]):
            yield np.full(2, 1000 * index + position, np.float32), np.array(1000 * index + position)

    return sample_stream(shard, samples=options.pop("samples", lengths), **options)


def targets_of(stream: BatchStream, replica: int, replicas: int, **options: Any) -> list[list[int]]:
    """Targets of a replica's local batches."""
    start = options.pop("start", (0, None))
    loader = Loader(stream, replicas=replicas, local_replicas=[replica], **(PLAIN | options))
    local = [batch.slices[0][0] for batch in loader.from_step(*start)]
    return [each.targets.tolist()[: each.count] for each in local]


def joined(lengths: Sequence[int], replicas: int, **options: Any) -> list[list[int]]:
    """Targets of the global batches."""
    each = [targets_of(shards_of(lengths), r, replicas, **options) for r in range(replicas)]
    return [[*itertools.chain(*parts)] for parts in zip(*each, strict=True)]


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("fields", [{}, {"epochs": None, "steps": 25, "epoch_steps": 10}])
def test_the_global_batches_are_the_same_for_any_number_of_replicas(
    replicas: int, fields: dict[str, Any]
) -> None:
    whole = joined(LENGTHS, 1, **fields)
    assert joined(LENGTHS, replicas, **fields) == whole
    shards = [[target // 1000 for target in batch] for batch in whole]
    assert all(batch == sorted(batch) for batch in shards)
    epoch = [*itertools.chain(*whole)][:77]
    assert fields or sorted(epoch) == [
        1000 * k + p for k, n in enumerate(LENGTHS) for p in range(n)
    ]


@pytest.mark.parametrize(
    ("lengths", "expected"), [((8,) * 4, [2, 3]), ((8,) * 16, [*range(4, 8), *range(12, 16)])]
)
def test_a_replica_reads_the_shards_of_its_rows_alone(
    lengths: Sequence[int], expected: list[int]
) -> None:
    opened: list[int] = []
    stream = shards_of(lengths, opened)
    targets_of(stream, 1, 2, epochs=1)
    assert sorted(opened) == expected
    assert stream.read_count.samples == sum(lengths) / 2


@pytest.mark.parametrize("step", [3, 10, 14])
def test_resuming_by_states_with_another_number_of_replicas(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unit.data.torch_shards import CountedShards

    monkeypatch.setattr("isotrain.core.data.streaming.shards._STATE_SECONDS", 0.0)

    def stream() -> BatchStream:
        return sample_stream(CountedShards(), samples=LENGTHS)

    whole = [*Loader(stream(), replicas=1, local_replicas=[0], state_seconds=0.0, **PLAIN)]
    state = kept(whole[step - 1].stream_state)
    assert state is not None
    targets = [batch.slices[0][0].targets.tolist() for batch in whole]
    for start in ((step, state), (step, None)):
        resumed = [stream() for _ in range(2)]
        each = [targets_of(part, r, 2, start=start) for r, part in enumerate(resumed)]
        assert [a + b for a, b in zip(*each, strict=True)] == targets[step:]
        read = sum(part.read_count.samples for part in resumed)
        rest = 2 * 77 - sum(map(len, targets[:step]))
        assert read <= rest + 16 * 3 if start[1] else read > rest
    with pytest.raises(DataError, match="other lengths than when the checkpoint was saved"):
        targets_of(shards_of((40, 8, 30)), 0, 1, start=(step, state))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_resuming_by_the_states_of_two_readers(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unit.data.torch_shards import CountedShards

    monkeypatch.setattr("isotrain.core.data.streaming.shards._STATE_SECONDS", 0.0)

    def loader(stream: BatchStream, replica: int, replicas: int) -> Loader:
        options: dict[str, Any] = {**PLAIN, "state_seconds": 0.0}
        return Loader(stream, replicas=replicas, local_replicas=[replica], **options)

    def stream() -> BatchStream:
        return sample_stream(CountedShards(), samples=LENGTHS)

    step = 14  # of 20: the second epoch
    states = [
        kept([*itertools.islice(loader(stream(), replica, 2), step)][-1].stream_state)
        for replica in range(2)
    ]
    whole = targets_of(stream(), 0, 1)[step:]
    read = []
    for state in (joined_states(states[0], states[1:]), states[0]):
        resumed = [stream() for _ in range(replicas)]
        each = [
            targets_of(part, r, replicas, start=(step, state)) for r, part in enumerate(resumed)
        ]
        assert [[*itertools.chain(*parts)] for parts in zip(*each, strict=True)] == whole
        read.append(sum(part.read_count.samples for part in resumed))
    assert read[0] + LENGTHS[-1] <= read[1], "the last shard is not read again from its start"


@pytest.mark.parametrize("lengths", [(8,), (8, 3)])
@pytest.mark.parametrize("are_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("resets", [True, False], ids=["resets", "goes on"])
def test_a_shard_resumes_at_its_end(
    lengths: Sequence[int], are_known: bool, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unit.data.torch_shards import CountedEpochs

    monkeypatch.setattr("isotrain.core.data.streaming.shards._STATE_SECONDS", 0.0)
    samples = lengths if are_known else sum(lengths)

    def loader() -> Loader:
        data = CountedEpochs(lengths, resets=resets)
        stream = sample_stream(data, samples=samples, shards=len(lengths))
        return Loader(
            stream,
            replicas=1,
            local_replicas=[0],
            state_seconds=0.0,
            **(PLAIN | {"global_batch_size": 2, "epochs": 3}),
        )

    batches = [*loader()]
    targets = [batch.slices[0][0].targets.tolist() for batch in batches]
    assert max(itertools.chain(*targets)) >= 200
    for step, batch in enumerate(batches[:-1], 1):
        resumed = loader().from_step(step, kept(batch.stream_state))
        assert [each.slices[0][0].targets.tolist() for each in resumed] == targets[step:]


def test_samples_that_are_skipped_are_not_kept() -> None:
    alive: weakref.WeakSet[Sample] = weakref.WeakSet()
    most_alive = 0

    def shard(index: int, shards: int) -> Iterator[Sample]:
        nonlocal most_alive
        for position in range(500):
            sample = Sample(np.zeros(2), position, "")
            alive.add(sample)
            most_alive = max(most_alive, len(alive))
            yield sample

    stream = sample_stream(shard, "inputs", "targets", samples=[500])
    batches = targets_of(stream, 0, 1, epochs=1, start=(60, None))
    assert [*itertools.chain(*batches)] == [*range(480, 500)]
    assert stream.read_count.samples == 500
    assert most_alive < 100


@pytest.mark.parametrize(("said", "given"), [((8, 9), "8"), ((8, 7), "more than 7")])
def test_a_shard_of_another_length_ends_the_run(said: Sequence[int], given: str) -> None:
    with pytest.raises(DataError, match=f"shard 1 of the stream gave {given} samples in an epoch"):
        targets_of(shards_of((8, 8), samples=said), 0, 1)


def test_lengths_that_fit_no_shards_are_refused() -> None:
    for samples, shards in (([3, 4], 3), ([3, -1], 2), ([0, 0], 2)):
        with pytest.raises(DataError, match=f"expected one number for each of {shards} shards"):
            shards_of((3, 4), samples=samples, shards=shards)


@dataclasses.dataclass(eq=False)
class Sample:
    """A sample with parts by name."""

    inputs: np.ndarray
    targets: int
    text: str


def test_bytes_of_samples_of_any_kind_are_counted() -> None:
    def shard(index: int, shards: int) -> Iterator[Sample]:
        yield from [Sample(np.zeros(3, np.float32), index, "12345")] * 4

    stream = sample_stream(shard, "inputs", "targets", samples=[4, 4])
    targets_of(stream, 0, 1, epochs=1)
    assert stream.read_count == ReadCount(8, 8 * (3 * 4 + 8 + 5))


def test_a_transform_has_no_partners() -> None:
    def partners(inputs: Any, targets: Any, random: Any) -> Any:
        return random.partner()[:2]

    with pytest.raises(DataError, match=r"random.partner\(\): only this replica's samples"):
        targets_of(shards_of((8, 8)), 0, 1, transform=partners)


def test_widths_of_padded_samples_may_differ_between_processes() -> None:
    def shard(index: int, shards: int) -> Iterator[np.ndarray]:
        yield from [np.zeros(1 + index)] * 4

    padded = sample_stream(shard, samples=[4, 4]).with_collate(Padding({"inputs": 0}))
    batches = [
        next(iter(Loader(padded, replicas=2, local_replicas=[replica], **PLAIN)))
        for replica in range(2)
    ]
    assert [batch.slices[0][0].inputs.shape for batch in batches] == [(4, 1), (4, 2)]
    assert all(batch.varying_widths for batch in batches)
    assert not next(
        iter(Loader(shards_of((8, 8)), replicas=1, local_replicas=[0], **PLAIN))
    ).varying_widths


def test_a_collate_that_leaves_samples_out_is_refused() -> None:
    def collate(samples: list[Any]) -> Any:
        return np.stack([each[0] for each in samples[1:]])

    with pytest.raises(DataError, match="has 7 rows, expected 8"):
        targets_of(shards_of((8, 8), collate=collate), 0, 1)


@pytest.mark.slow
def test_the_readers_of_two_hosts_read_their_shards(
    connect: Callable[..., Any], tmp_path: Path
) -> None:
    for host in range(2):
        (tmp_path / str(host)).mkdir()
    streams = [
        connect(
            functools.partial(reader_programs.scheduled, str(tmp_path / str(host))),
            shard_processes=2,
            replicas=[host],
        )[0]
        for host in range(2)
    ]
    each = [targets_of(part, host, 2, global_batch_size=9) for host, part in enumerate(streams)]
    (alone,) = reader_programs.scheduled(str(tmp_path)).values()
    expected = targets_of(alone, 0, 1, global_batch_size=9)
    assert [a + b for a, b in zip(*each, strict=True)] == expected
    assert [sorted(path.name for path in (tmp_path / host).iterdir()) for host in "01"] == [
        ["0", "1"],
        ["1", "2"],
    ]
    last_of_shard_1 = 1  # host 0 has it, so that the other one stops before it
    expected_counts = [2 * (40 + 7), 2 * (7 + 30) - last_of_shard_1]
    assert [part.read_count.samples for part in streams] == expected_counts
