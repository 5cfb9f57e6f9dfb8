"""Batches of people's own loaders become the global batches that arrays would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from unit.data.py_datasets import PyDataset
from unit.data.stream_samples import INPUTS, TARGETS, Pairs, Uneven, facts, given_by, loader

from isotrain.core.data.arrays import arrays
from isotrain.core.data.dataset import DataSet, as_dataset
from isotrain.core.data.sources import as_source, source_notes, stream
from isotrain.core.data.streaming import streams
from isotrain.core.data.streaming import streams as first_epoch
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.data.streaming.streams import reader as as_reader
from isotrain.core.errors import DataError


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    global_batch_size=st.integers(1, 25),
    replicas=st.integers(1, 5),
    gradient_accumulation_steps=st.integers(1, 3),
    drop_remainder=st.booleans(),
)
def test_global_batches_equal_those_of_arrays(
    global_batch_size, replicas, gradient_accumulation_steps, drop_remainder
):
    options = {
        "global_batch_size": global_batch_size,
        "replicas": replicas,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
    if not drop_remainder or global_batch_size <= 20:
        options["drop_remainder"] = drop_remainder
    assert given_by(as_source(Uneven()), **options) == given_by(arrays(INPUTS, TARGETS), **options)


@pytest.mark.parametrize("samples", [None, 20])
def test_a_resumed_run_reads_the_same_batches(samples):
    whole = given_by(stream(Uneven(shift=3), samples), epochs=3)
    assert whole[0][-1] != whole[3][-1]  # another order in the second epoch
    for start in range(10):
        resumed = given_by(stream(Uneven(shift=3), samples), epochs=3, start_step=start)
        assert resumed == whole[start:]


def test_batches_of_the_right_size_are_not_copied():
    batch = (INPUTS[:8], TARGETS[:8])
    found = next(iter(loader(stream(lambda: iter([batch]), 8), epochs=1)))
    assert np.shares_memory(found.slices[0][0].inputs, INPUTS)


class Placed:
    """What a framework computes on; only the whole of it is."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.ndim = array, array.shape, array.ndim

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self.array


def is_on_device(value: object) -> bool:
    return isinstance(value, Placed)


@pytest.mark.parametrize(("replicas", "gradient_accumulation_steps"), [(1, 1), (2, 1), (1, 2)])
def test_device_tensors_are_not_copied(replicas: int, gradient_accumulation_steps: int) -> None:
    given = [(Placed(INPUTS[rows]), Placed(TARGETS[rows])) for rows in (slice(8), slice(8, 16))]
    source = stream(lambda: iter([*given, (Placed(INPUTS[16:]), Placed(TARGETS[16:]))]), 20)
    chosen = {
        "replicas": replicas,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "to_device": Placed,
        "epochs": 1,
    }
    found = list(loader(source, is_on_device=is_on_device, **chosen))
    plain = {**chosen, "to_device": None}
    assert list(map(facts, found)) == given_by(arrays(INPUTS, TARGETS), **plain)
    taken = [found[index].slices[0][0].inputs is given[index][0] for index in (0, 1)]
    assert taken == [replicas == gradient_accumulation_steps == 1] * 2
    assert all(is_on_device(p.inputs) for batch in found for own in batch.slices for p in own)


def test_an_in_place_transform_leaves_the_streams_arrays():
    inputs = INPUTS.copy()

    def halved(inputs, targets, random):
        inputs /= 2
        return inputs, targets

    data = stream(lambda: iter([(inputs, TARGETS)]), len(inputs))
    first, second = (given_by(data, transform=halved, epochs=2)[place] for place in (0, -1))
    assert first != second  # other samples
    np.testing.assert_array_equal(inputs, INPUTS)


def test_a_transform_of_a_stream_draws_by_sample():
    def noted(inputs, targets, random):
        return inputs, random.uniform()

    for replicas in (1, 3):
        both = [
            [draw for batch in loader(source, replicas=replicas, transform=noted, epochs=1)
             for own in batch.slices for p in own for draw in p.targets[: p.count].tolist()]
            for source in (as_source(Uneven()), arrays(INPUTS, TARGETS))
        ]  # fmt: skip
        assert both[0] == both[1]


def test_transforms_of_a_stream_are_chained():
    twice = stream(Uneven(), 20).changed(lambda batch: (batch[0] + 1, batch[1]))
    found = next(iter(twice.changed(lambda batch: (batch[0] * 2, batch[1])).epoch(0)))
    plain = next(iter(stream(Uneven(), 20).epoch(0)))
    assert np.array_equal(found[0], (plain[0] + 1) * 2)


def test_only_the_first_batch_of_an_epoch_has_a_fingerprint():
    marked = [batch.fingerprint is not None for batch in loader(as_source(Uneven()))]
    assert marked == [True, False, False] * 2
    first = [
        next(
            iter(
                loader(
                    stream(
                        Uneven(
                            shift,
                        ),
                        20,
                    )
                )
            )
        ).fingerprint
        for shift in (0, 0)
    ]
    other = Uneven(3)
    other.readings = 1
    assert first[0] == first[1] != next(iter(loader(stream(other, 20)))).fingerprint


class Drawing(IterableDataset):
    """Draws by a generator of its own, and by the one that all code shares, in one array for all samples."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        buffer = np.empty((4, 2), np.float32)
        for _ in range(5):
            buffer[...] = self.own.normal(size=(4, 2)) + np.random.normal()
            yield buffer, TARGETS[:4]


class Drawn(WeightedRandomSampler):
    """A sampler of one's own."""


class Cut(BatchSampler):
    """A batch sampler of one's own."""


def drawn_by_a_sampler() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    sampler = Drawn([1.0] * 19 + [30.0], 21, generator=generator)
    return DataLoader(Pairs(), batch_size=4, sampler=sampler, drop_last=True)


def shuffled_by_torch() -> DataLoader:
    return DataLoader(Pairs(), batch_sampler=Cut(RandomSampler(Pairs()), 4, False))


@pytest.mark.parametrize(
    "make",
    [
        drawn_by_a_sampler,
        shuffled_by_torch,
        lambda: DataLoader(Drawing(), batch_size=None),
        PyDataset,
    ],
)
def test_counting_the_samples_changes_none_of_them(make: Callable) -> None:
    """The epochs are those of a plain loop, also in a run that resumes in the second."""
    epochs = []
    for reads in ("plainly", "from the start", "from the second"):
        torch.manual_seed(2)
        np.random.seed(2)
        made = make()
        if reads == "plainly":
            read = as_reader(made)
            epochs.append([[copied(batch) for batch in read()] for _ in range(2)])
            continue
        source = as_source(made)
        assert len(source) == 20
        wanted = (0, 1) if reads == "from the start" else (1,)
        epochs.append([[copied(batch) for batch in source.epoch(number)] for number in wanted])
    plain, first, second = epochs
    assert plain == first
    assert plain[1:] == second


def copied(batch: object) -> list:
    return [np.asarray(part).tolist() for part in batch]


def test_a_sampler_gives_the_length_without_reading() -> None:
    made = drawn_by_a_sampler()
    before = made.sampler.generator.get_state()
    assert len(as_source(made)) == 20
    assert torch.equal(made.sampler.generator.get_state(), before)


def test_an_epoch_too_large_to_keep_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_epoch, "MOST_BYTES", 100)
    source = as_source(Uneven())
    assert len(source) == 20
    (note,) = source_notes(source)
    assert "training begins with its second epoch" in note
    assert given_by(source) == given_by(arrays(INPUTS, TARGETS))
    assert not [*source_notes(stream(Uneven(), 20))]


def test_a_possibly_endless_stream_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_epoch, "SILENT_SECONDS", -1.0)
    with pytest.warns(match=r"count its samples, 3 so far.*epoch_steps") as told:
        assert len(as_source(Uneven())) == 20
    assert [warning.filename for warning in told] == [streams.__file__]  # ours, which events tell


def test_functions_that_make_iterators_are_streams():
    dataset = as_dataset(DataSet(lambda: iter(Uneven())))
    assert isinstance(dataset.train, BatchStream)
    assert given_by(dataset.train) == given_by(arrays(INPUTS, TARGETS))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: [INPUTS], "the function returned list"),
        (lambda: iter([(3, 4)]), "gave int where arrays"),
        (lambda: iter([()]), "is empty"),
        (lambda: iter([(INPUTS, TARGETS[:3])]), r"equally many rows.*'inputs': 20, 'targets': 3"),
        (lambda: iter([(INPUTS, TARGETS), (INPUTS[:, :1], TARGETS)]), "more than their number"),
        (lambda: iter([(INPUTS, TARGETS, TARGETS, 1)]), "a tuple of 4"),
        (lambda: iter(()), "the data set is empty"),
    ],
)
def test_unusable_streams_are_explained(read, message):
    with pytest.raises(DataError, match=message):
        given_by(as_source(read), global_batch_size=25)


@pytest.mark.parametrize(("promised", "said"), [(19, "20 or more samples"), (21, "20 samples")])
def test_a_stream_of_another_length_is_an_error(promised, said):
    with pytest.raises(DataError, match=f"gave {said} in an epoch, expected {promised}"):
        given_by(stream(Uneven(), promised))


@pytest.mark.parametrize("value", [iter(Uneven()), Uneven, list])
def test_an_iterator_and_a_class_are_refused_with_what_to_give_instead(value):
    with pytest.raises(DataError, match="give the function that makes it"):
        as_source(value)
