"""Streams of batches that are resumed from a state of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.stream_samples import CUTS, INPUTS, TARGETS, facts, kept, loader

from isotrain.core.data.arrays import InputsAndTargets
from isotrain.core.data.loader import Loader
from isotrain.core.data.sources import stream
from isotrain.core.data.streaming.stream_state import from_json, to_json
from isotrain.core.data.subset import class_weighted
from isotrain.core.errors import DataError


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
    """A stream of equal epochs whose iterator has a state of bytes, as Grain's do."""

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


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from([Shuffled, Numbered]),
    global_batch_size=st.integers(1, 20),
    replicas=st.integers(1, 3),
    drop_remainder=st.booleans(),
    weighs=st.booleans(),
    data=st.data(),
)
def test_a_stream_resumes_from_its_state(
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
    options |= {"replicas": replicas, "state_seconds": 0.0}

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
        mark = kept(found[stop - start - 1].stream_state) if stop > start else mark
        assert mark is not None or stop * global_batch_size <= 3  # only the first batch has none


def test_state_is_read_only_with_checkpoints() -> None:
    class Untellable(Shuffled):
        def state_dict(self) -> dict[str, object]:
            return {"reader": self}

    whole = list(loader(stream(Untellable(), 20), epochs=2))
    assert all(batch.stream_state is None for batch in whole)
    with pytest.warns(UserWarning, match="state has a Untellable") as told:
        found = list(loader(stream(Untellable(), 20), epochs=2, state_seconds=0.0))
    assert len({str(each.message) for each in told}) == 1
    assert [facts(batch) for batch in found] == [facts(batch) for batch in whole]
    assert all(batch.stream_state is None for batch in found)


def test_state_is_read_only_as_often_as_needed() -> None:
    class Asked(Numbered):
        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return {"read": self.read}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError("there is no mark")

    own = Asked()
    batches = list(loader(stream(own, 20), epochs=2, state_seconds=3600.0))
    assert own.asked == 2  # once in each epoch
    assert batches[-1].stream_state is not None


def test_a_batch_before_the_first_state_of_an_epoch_has_that_of_the_last_epoch() -> None:
    batches = list(loader(stream(Shuffled(), 20), epochs=2, global_batch_size=2, state_seconds=0.0))
    epochs = [batch.stream_state and batch.stream_state.epoch for batch in batches]
    assert (epochs[0], epochs[9], epochs[10], epochs[19]) == (None, 0, 0, 1)


class Forgetful(Shuffled):
    """Tells where it is, and forgets in which order."""

    def load_state_dict(self, state: dict) -> None:
        (self.position,) = state["position"]


def test_a_stream_that_ignored_its_state_is_refused() -> None:
    options = {"global_batch_size": 4, "state_seconds": 0.0}
    whole = list(loader(stream(Forgetful(), 20), **options))
    mark = whole[7].stream_state
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
def test_malicious_states_are_refused(harm: object) -> None:
    with pytest.raises(DataError, match="not written by isotrain"):
        from_json([harm])
