"""Epochs of a number of steps: streams without an end, and passes that epochs do not end with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.stream_samples import CUTS, INPUTS, TARGETS, facts, kept, loader
from unit.data.test_sharded_streams import Stream
from unit.data.test_stream_states import Numbered, Shuffled

from isotrain.core.data.arrays import InputsAndTargets, arrays
from isotrain.core.data.order.order import shuffled
from isotrain.core.data.order.samples import Samples
from isotrain.core.data.sources import as_source, stream
from isotrain.core.errors import DataError


def endless() -> Iterator[InputsAndTargets]:
    """Batches of 3, 7, 1 and 9 samples, over and over, whose samples never repeat."""
    sample = 0
    for number in count():
        size = CUTS[number % len(CUTS)]
        rows = np.arange(sample, sample + size)
        sample += size
        yield rows[:, None].astype(np.float32), rows


def samples_of(batches: list) -> list[int]:
    return [
        int(sample)
        for batch in batches
        for local in batch.slices
        for each in local
        for sample in each.targets[: each.count]
    ]


@settings(deadline=None, max_examples=60)
@given(
    global_batch_size=st.integers(1, 20),
    replicas=st.integers(1, 3),
    epoch_steps=st.integers(1, 4),
    start=st.integers(0, 8),
)
def test_an_endless_stream_is_read_once_and_not_counted(
    global_batch_size: int, replicas: int, epoch_steps: int, start: int
) -> None:
    options = {"epochs": None, "steps": 9, "epoch_steps": epoch_steps, "replicas": replicas}
    made = loader(stream(endless), global_batch_size=global_batch_size, **options)
    assert (made.steps_per_epoch, made.total_steps) == (epoch_steps, 9)
    batches = list(made)
    assert samples_of(batches) == [*range(9 * global_batch_size)]
    assert [(batch.epoch, batch.index) for batch in batches] == [
        divmod(step, epoch_steps) for step in range(9)
    ]
    assert [batch.is_last_of_epoch for batch in batches] == [
        step % epoch_steps == epoch_steps - 1 for step in range(9)
    ]
    resumed = loader(stream(endless), global_batch_size=global_batch_size, **options)
    assert [*map(facts, resumed.from_step(start))] == [*map(facts, batches[start:])]


def test_no_more_is_read_than_the_run_needs() -> None:
    read = []

    def noted() -> Iterator[InputsAndTargets]:
        for batch in endless():
            read.append(len(batch[1]))
            yield batch

    assert len(list(loader(stream(noted), epoch_steps=2, global_batch_size=10))) == 4
    assert sum(read) == 40


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from([Shuffled, Numbered]),
    global_batch_size=st.integers(1, 20),
    replicas=st.integers(1, 3),
    data=st.data(),
)
def test_a_stream_that_ends_is_read_again(
    kind: Callable[[], Shuffled | Numbered],
    global_batch_size: int,
    replicas: int,
    data: st.DataObject,
) -> None:
    """The end of a reading cuts no global batch short, and a resumed run goes on by the state."""
    steps = -(-50 // global_batch_size)  # ends in the third reading
    options = {"global_batch_size": global_batch_size, "replicas": replicas, "state_seconds": 0.0}
    options |= {"epochs": None, "steps": steps, "epoch_steps": 3}
    whole = list(loader(stream(kind()), **options))
    samples = samples_of(whole)
    readings = [samples[start : start + 20] for start in range(0, len(samples), 20)]
    assert sorted(readings[0]) == sorted(readings[1]) == [*range(20)]
    assert all(batch.size == global_batch_size for batch in whole)
    stop = data.draw(st.integers(1, steps))
    state, again = kept(whole[stop - 1].stream_state), kind()
    rest = list(loader(stream(again), **options).from_step(stop, state))
    assert [facts(batch) for batch in rest] == [facts(batch) for batch in whole[stop:]]
    if state is not None:
        batches = -(-steps * global_batch_size // 20) * len(CUTS)
        assert again.read <= batches - state.samples_read // 20 * len(CUTS)


def test_samples_by_position_have_a_new_order_in_each_pass() -> None:
    data = Samples.of(arrays(INPUTS, TARGETS), global_batch_size=8, seed=5, drop_remainder=False)
    options = {"order": shuffled(data), "global_batch_size": 8}
    passes = list(loader(arrays(INPUTS, TARGETS), epochs=3, **options))
    batches = list(loader(arrays(INPUTS, TARGETS), epochs=None, steps=9, epoch_steps=2, **options))
    assert samples_of(batches) == samples_of(passes)
    assert [(batch.epoch, batch.index) for batch in batches] == [
        divmod(step, 2) for step in range(9)
    ]


def test_a_sharded_stream_is_read_again() -> None:
    options = {"global_batch_size": 6, "replicas": 3}
    passes = list(loader(Stream(), epochs=3, **options))
    options |= {"epochs": None, "steps": len(passes), "epoch_steps": 5}
    batches = list(loader(Stream(), **options))
    assert samples_of(batches) == samples_of(passes)
    assert [batch.epoch for batch in batches] == [step // 5 for step in range(len(passes))]
    for start in (3, 4, 10):
        rest = loader(Stream(), **options).from_step(start)
        assert [facts(batch) for batch in rest] == [facts(batch) for batch in batches[start:]]


class Endless:
    """Data like a `tf.data.Dataset` that never ends."""

    def __iter__(self) -> Iterator[InputsAndTargets]:
        return endless()

    def cardinality(self) -> int:
        return -1


@pytest.mark.parametrize("data", [Endless(), lambda: Endless()])
def test_an_endless_data_set_of_tensorflow_needs_epoch_steps(data: object) -> None:
    with pytest.raises(DataError, match=r"never ends.*`epoch_steps`"):
        loader(as_source(data))
    batches = list(loader(as_source(data), epochs=None, steps=6, epoch_steps=4))
    assert samples_of(batches) == [*range(48)]


def test_a_stream_that_gives_nothing_in_its_second_reading_is_refused() -> None:
    once = islice(endless(), 3)
    with pytest.raises(DataError, match="no batch when it was read again"):
        list(loader(stream(lambda: once), epochs=None, steps=6, epoch_steps=2))
