"""Batches of people's own loaders become the global batches that arrays would give."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from isotrain.core.data.arrays import ArraySource, InputsAndTargets, arrays
from isotrain.core.data.batch import Batch
from isotrain.core.data.dataset import DataSet, as_dataset
from isotrain.core.data.loader import Loader
from isotrain.core.data.map_style import MapStyle
from isotrain.core.data.sources import as_source, source_notes, stream
from isotrain.core.data.streaming import streams
from isotrain.core.data.streaming import streams as first_epoch
from isotrain.core.data.streaming.stream_state import StreamState, from_json, to_json
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.data.streaming.streams import reader as as_reader
from isotrain.core.data.subset import class_weighted, split
from isotrain.core.errors import DataError
from isotrain.core.json_records import record

INPUTS = np.arange(40, dtype=np.float32).reshape(20, 2)
TARGETS = np.arange(20)
CUTS = (3, 7, 1, 9)


class Uneven:
    """Gives the samples in batches of 3, 7, 1 and 9, from another one on in each reading."""

    def __init__(self, shift: int = 0) -> None:
        self.shift, self.readings = shift, 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rows = np.roll(np.arange(20), self.readings * self.shift)
        self.readings += 1
        for start, stop in zip(np.cumsum((0, *CUTS)), np.cumsum(CUTS), strict=False):
            yield INPUTS[rows[start:stop]], TARGETS[rows[start:stop]]


def loader(source: object, **options: object) -> Loader:
    chosen: dict = {
        "global_batch_size": 8,
        "replicas": 1,
        "seed": 5,
        "shuffle": False,
        "drop_remainder": False,
        "prefetch": 0,
        "epochs": 2,
    } | options
    return Loader(source, local_replicas=range(chosen["replicas"]), **chosen)


def facts(batch: Batch) -> tuple:
    slices = [
        (np.asarray(p.inputs).tolist(), np.asarray(p.targets).tolist(), p.count, p.weight)
        for own in batch.slices
        for p in own
    ]
    return batch.epoch, batch.index, batch.step, batch.size, batch.even, slices


def given_by(source: object, **options: object) -> list[tuple]:
    return [facts(batch) for batch in loader(source, **options)]


@settings(deadline=None, max_examples=60)
@given(
    global_batch_size=st.integers(1, 25),
    replicas=st.integers(1, 5),
    gradient_accumulation_steps=st.integers(1, 3),
    drop_remainder=st.booleans(),
)
def test_the_same_global_batches_as_of_arrays(
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
def test_a_run_that_resumes_reads_what_it_would_have_read(samples):
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
def test_what_a_replica_computes_on_is_taken_as_it_is(
    replicas: int, gradient_accumulation_steps: int
) -> None:
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


def test_a_transform_that_works_in_place_leaves_what_the_stream_gave():
    inputs = INPUTS.copy()

    def halved(inputs, targets, random):
        inputs /= 2
        return inputs, targets

    data = stream(lambda: iter([(inputs, TARGETS)]), len(inputs))
    first, second = (given_by(data, transform=halved, epochs=2)[place] for place in (0, -1))
    assert first != second  # other samples
    np.testing.assert_array_equal(inputs, INPUTS)


def test_a_transform_knows_which_samples_it_has():
    def noted(inputs, targets, random):
        return inputs, random.uniform()

    for replicas in (1, 3):
        both = [
            [draw for batch in loader(source, replicas=replicas, transform=noted, epochs=1)
             for own in batch.slices for p in own for draw in p.targets[: p.count].tolist()]
            for source in (as_source(Uneven()), arrays(INPUTS, TARGETS))
        ]  # fmt: skip
        assert both[0] == both[1]


def test_a_stream_that_is_changed_twice_is_changed_by_both():
    twice = stream(Uneven(), 20).changed(lambda batch: (batch[0] + 1, batch[1]))
    found = next(iter(twice.changed(lambda batch: (batch[0] * 2, batch[1])).epoch(0)))
    plain = next(iter(stream(Uneven(), 20).epoch(0)))
    assert np.array_equal(found[0], (plain[0] + 1) * 2)


def test_only_the_first_batch_of_an_epoch_says_what_it_is():
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


class Pairs(Dataset):
    """A map-style data set whose samples are made one by one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return INPUTS[index], index


class Endless(IterableDataset):
    """An iterable-style data set."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        return iter(zip(INPUTS, TARGETS, strict=True))


def gathered(source: object) -> tuple[list, list]:
    inputs, targets = source.gather(np.array([4, 0, 19]))
    return np.asarray(inputs).tolist(), np.asarray(targets).tolist()


def test_of_a_torch_loader_its_samples_are_taken():
    expected = (INPUTS[[4, 0, 19]].tolist(), [4, 0, 19])
    tensors = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    together = as_source(DataLoader(tensors, batch_size=3, shuffle=True))
    assert isinstance(together, ArraySource)
    assert gathered(together) == expected
    single = as_source(DataLoader(Pairs(), batch_size=3))
    assert isinstance(single, MapStyle)
    assert gathered(single) == expected


def test_workers_that_are_not_used_are_told_of():
    parts = split(as_source(DataLoader(Pairs(), batch_size=3, num_workers=2)), 0.25)
    for part in parts:
        (note,) = source_notes(class_weighted(part, {0: 2.0}))
        assert "the 2 worker processes of the DataLoader are not used" in note
    tensors = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    for unused in (DataLoader(tensors, num_workers=2), DataLoader(Pairs()), (INPUTS, TARGETS)):
        assert not [*source_notes(as_source(unused))]


def test_a_collate_function_is_used():
    def collate(samples):
        inputs, targets = zip(*samples, strict=True)
        return [torch.from_numpy(np.stack(inputs)), torch.zeros(len(targets))], np.array(targets)

    inputs, targets = as_source(DataLoader(Pairs(), collate_fn=collate)).gather(np.array([2, 1]))
    assert isinstance(inputs, tuple)
    assert (inputs[0].tolist(), targets.tolist()) == (INPUTS[[2, 1]].tolist(), [2, 1])


def test_a_torch_loader_with_an_order_of_its_own_is_a_stream():
    own = BatchSampler(SequentialSampler(Pairs()), 3, drop_last=False)
    for torch_loader in (
        DataLoader(Pairs(), batch_sampler=own),
        DataLoader(Pairs(), sampler=list(range(20)), batch_size=3),
        DataLoader(Endless(), batch_size=3),
    ):
        source = as_source(torch_loader)
        assert isinstance(source, BatchStream)
        assert given_by(source) == given_by(arrays(INPUTS, TARGETS))


def even_targets(samples: list[tuple]) -> object:
    """As people leave out samples that are broken."""
    kept = [(inputs, target) for inputs, target in samples if target % 2 == 0]
    return default_collate(kept)


def test_samples_that_a_collate_function_leaves_out_are_not_counted():
    sampler = list(range(20))
    torch_loader = DataLoader(Pairs(), sampler=sampler, batch_size=4, collate_fn=even_targets)
    assert len(as_source(torch_loader)) == 10
    assert given_by(as_source(torch_loader)) == given_by(arrays(INPUTS[::2], TARGETS[::2]))


class Drawing(IterableDataset):
    """Draws by a generator of its own, and by the one that all code shares, in one array for all samples."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        buffer = np.empty((4, 2), np.float32)
        for _ in range(5):
            buffer[...] = self.own.normal(size=(4, 2)) + np.random.normal()
            yield buffer, TARGETS[:4]


class PyDataset:
    """As Keras' class of this name: it shuffles at the end of each epoch."""

    def __init__(self) -> None:
        self.rows = np.arange(20)
        self.random = np.random.default_rng(4)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows[4 * position : 4 * position + 4]
        return INPUTS[rows], TARGETS[rows]

    def on_epoch_end(self) -> None:
        self.random.shuffle(self.rows)


def drawn_by_a_sampler() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    sampler = WeightedRandomSampler([1.0] * 19 + [30.0], 21, generator=generator)
    return DataLoader(Pairs(), batch_size=4, sampler=sampler, drop_last=True)


def shuffled_by_torch() -> DataLoader:
    return DataLoader(Pairs(), batch_sampler=BatchSampler(RandomSampler(Pairs()), 4, False))


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
    """The epochs are those of a plain loop; so are those of a run that goes on in the second."""
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


def test_a_sampler_tells_the_samples_and_nothing_is_read() -> None:
    made = drawn_by_a_sampler()
    before = made.sampler.generator.get_state()
    assert len(as_source(made)) == 20
    assert torch.equal(made.sampler.generator.get_state(), before)


def test_of_an_epoch_too_large_to_keep_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_epoch, "MOST_BYTES", 100)
    source = as_source(Uneven())
    assert len(source) == 20
    (note,) = source_notes(source)
    assert "training begins with its second epoch" in note
    assert given_by(source) == given_by(arrays(INPUTS, TARGETS))
    assert not [*source_notes(stream(Uneven(), 20))]


def test_a_stream_that_may_never_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_epoch, "SILENT_SECONDS", -1.0)
    with pytest.warns(match=r"count its samples, 3 so far.*itertools.islice") as told:
        assert len(as_source(Uneven())) == 20
    assert [warning.filename for warning in told] == [streams.__file__]  # ours, which events tell


def test_an_iterable_data_set_of_torch_needs_a_loader() -> None:
    with pytest.raises(DataError, match=r"DataLoader\(Endless\(...\), batch_size=N\)"):
        as_source(Endless())


@pytest.mark.parametrize("options", [{"num_samples": 7}, {"replacement": True}])
def test_a_torch_loader_that_draws_in_a_way_of_its_own_is_a_stream(options):
    drawn = RandomSampler(Pairs(), **options)
    source = as_source(DataLoader(Pairs(), sampler=drawn, batch_size=3))
    assert isinstance(source, BatchStream)
    assert len(source) == drawn.num_samples


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


class Shuffled:
    """Batches of 3, 7, 1 and 9 in another order in each epoch; goes on where its state says.

    Attributes:
        read: How many batches it gave.
    """

    def __init__(self) -> None:
        self.draws, self.position, self.read = np.random.default_rng(7), 0, 0
        self.epoch_draws: dict[str, object] = {}

    def state_dict(self) -> dict[str, object]:
        return {"draws": self.epoch_draws, "position": (self.position,), 1: np.arange(2)}

    def load_state_dict(self, state: dict) -> None:
        self.draws.bit_generator.state = state["draws"]
        (self.position,) = state["position"]

    def __iter__(self) -> Iterator[InputsAndTargets]:
        self.position %= len(CUTS)  # at its end, the next epoch begins
        self.epoch_draws = self.draws.bit_generator.state
        rows = self.draws.permutation(20)
        starts = np.cumsum((0, *CUTS))
        while self.position < len(CUTS):
            own = rows[starts[self.position] : starts[self.position + 1]]
            self.position, self.read = self.position + 1, self.read + 1
            yield INPUTS[own], TARGETS[own]


class Numbered:
    """The same batches in each epoch, of an iterator that tells in bytes where it is, as Grain's do."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> NumberedIterator:
        return NumberedIterator(self)


class NumberedIterator:
    def __init__(self, owner: Numbered) -> None:
        self.owner, self.position = owner, 0

    def get_state(self) -> bytes:
        return json.dumps({"position": self.position}).encode()

    def set_state(self, state: bytes) -> None:
        self.position = json.loads(state)["position"]

    def __iter__(self) -> NumberedIterator:
        return self

    def __next__(self) -> InputsAndTargets:
        if self.position == len(CUTS):
            raise StopIteration
        start = sum(CUTS[: self.position])
        stop = start + CUTS[self.position]
        self.position, self.owner.read = self.position + 1, self.owner.read + 1
        return INPUTS[start:stop], TARGETS[start:stop]


def kept(mark: StreamState | None) -> StreamState | None:
    """A mark as a checkpoint gives it back."""
    plain = json.loads(json.dumps(None if mark is None else dataclasses.asdict(mark)))
    return None if plain is None else record(StreamState, plain, "run.json")


@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from([Shuffled, Numbered]),
    global_batch_size=st.integers(1, 20),
    replicas=st.integers(1, 3),
    drop_remainder=st.booleans(),
    weighs=st.booleans(),
    data=st.data(),
)
def test_a_stream_goes_on_by_its_own_state(
    kind: Callable[[], Shuffled | Numbered],
    global_batch_size: int,
    replicas: int,
    drop_remainder: bool,
    weighs: bool,
    data: st.DataObject,
) -> None:
    options = {
        "global_batch_size": global_batch_size,
        "drop_remainder": drop_remainder,
        "epochs": 3,
    }
    options |= {"replicas": replicas, "mark_seconds": 0.0}

    def loaded(own: Shuffled | Numbered) -> Loader:
        weights = {number: 1.0 + number for number in range(20)}
        source = stream(own, 20)
        return loader(class_weighted(source, weights) if weighs else source, **options)

    whole = list(loaded(kind()))
    stops = data.draw(st.lists(st.integers(1, len(whole)), min_size=1, max_size=3).map(sorted))
    mark = None
    for number, stop in enumerate(stops):  # each goes on where the one before was stopped
        start, own = stops[number - 1] if number else 0, kind()
        found = list(loaded(own).from_step(start, mark))
        assert [facts(batch) for batch in found] == [facts(batch) for batch in whole[start:]]
        if mark is not None:
            assert own.read <= (3 - mark.epoch) * len(CUTS) - 1, "it read what was before"
        mark = kept(found[stop - start - 1].mark) if stop > start else mark
        assert mark is not None or stop * global_batch_size <= 3  # only the first batch has none


def test_only_who_keeps_checkpoints_asks_a_stream_where_it_is() -> None:
    class Untellable(Shuffled):
        def state_dict(self) -> dict[str, object]:
            return {"reader": self}

    whole = list(loader(stream(Untellable(), 20), epochs=2))
    assert all(batch.mark is None for batch in whole)
    with pytest.warns(UserWarning, match="state has a Untellable") as told:
        found = list(loader(stream(Untellable(), 20), epochs=2, mark_seconds=0.0))
    assert len({str(each.message) for each in told}) == 1
    assert [facts(batch) for batch in found] == [facts(batch) for batch in whole]
    assert all(batch.mark is None for batch in found)


def test_a_stream_is_asked_where_it_is_no_more_often_than_is_wanted() -> None:
    class Asked(Numbered):
        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return {"read": self.read}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError("there is no mark")

    own = Asked()
    batches = list(loader(stream(own, 20), epochs=2, mark_seconds=3600.0))
    assert own.asked == 2  # once in each epoch
    assert batches[-1].mark is not None


class Forgetful(Shuffled):
    """Tells where it is, and forgets in which order."""

    def load_state_dict(self, state: dict) -> None:
        (self.position,) = state["position"]


def test_a_stream_that_has_not_gone_to_where_it_was_is_refused_and_may_read_on() -> None:
    options = {"global_batch_size": 4, "mark_seconds": 0.0}
    whole = list(loader(stream(Forgetful(), 20), **options))
    mark = whole[7].mark
    assert mark is not None
    with pytest.raises(DataError, match="Forgetful did not return to its saved state"):
        list(loader(stream(Forgetful(), 20), **options).from_step(8, mark))
    again = Forgetful()
    rest = loader(stream(lambda: (batch for batch in again), 20), **options).from_step(8, mark)
    assert [facts(batch) for batch in rest] == [facts(batch) for batch in whole[8:]]


def test_states_of_any_form_come_back_as_they_were() -> None:
    generator = torch.Generator().manual_seed(5)
    given = {
        "none": None,
        3: [True, 1 << 80, 0.5, float("-inf"), "text", b"\0\xff"],
        "nested": {"tuple": (1, (2, {})), "array": np.arange(6.0).reshape(2, 3)[:, ::-1]},
        "torch": generator.get_state(),
    }
    found = from_json(json.loads(json.dumps(to_json(given))))
    array, tensor = found["nested"].pop("array"), found.pop("torch")
    assert np.array_equal(array, given["nested"].pop("array"))
    assert torch.equal(tensor, given.pop("torch"))
    generator.set_state(tensor)
    assert found == given


@pytest.mark.parametrize("value", [{1, 2}, torch.ones(2, dtype=torch.bfloat16), np.array([print])])
def test_states_that_no_checkpoint_holds_are_refused(value: object) -> None:
    with pytest.raises(DataError, match=rf"state has a {type(value).__name__}"):
        to_json({"nested": [value]})


@pytest.mark.parametrize(
    "harm",
    [
        {"array": {"of": "os", "dtype": "O", "shape": [1], "bytes": "AAAAAAAAAAA="}},
        {"array": {"of": "os", "dtype": "<f8", "shape": [1 << 40], "bytes": "AAAAAAAAAAA="}},
        {"array": {}},
        {"system": "true"},
        {"dict": [[["a", "list"], 1]]},
        {"bytes": 3},
        {"dict": 3, "list": 4},
    ],
    ids=str,
)
def test_states_that_were_made_to_do_harm_are_refused(harm: object) -> None:
    with pytest.raises(DataError, match="not written by isotrain"):
        from_json([harm])
