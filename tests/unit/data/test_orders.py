"""The orders that a spec can name: pure functions of seed and epoch, with what each of them promises."""

from __future__ import annotations

import collections
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.loaded_batches import loader, source_of
from unit.data.loaded_batches import samples as samples_of

from isotrain.core.data.arrays import arrays
from isotrain.core.data.map_style import BatchIndexed, MapStyle
from isotrain.core.data.order import permutation as permutations
from isotrain.core.data.order.mixing import interleaved
from isotrain.core.data.order.named_orders import ordered
from isotrain.core.data.order.order import Order, numbered, sequential
from isotrain.core.data.order.permutation import Bijection, permutation
from isotrain.core.data.order.samples import Columns, Samples
from isotrain.core.data.subset import class_weighted, split
from isotrain.core.errors import DataError

LENGTHS = np.random.default_rng(0).integers(1, 60, 50)
CLASSES = np.array([0] * 35 + [1] * 10 + [7] * 5)
WEIGHTS = np.where(np.arange(50) % 5, 1.0, 0.0)
SOURCE = arrays({"x": np.arange(50.0), "length": LENGTHS, "weight": WEIGHTS}, CLASSES)


def data(source: Any = SOURCE, **options: Any) -> Samples:
    chosen = {"global_batch_size": 8, "seed": 3, "drop_remainder": False} | options
    return Samples.of(source, **chosen)


def by_epoch(seed: int, epoch: int, length: int, columns: Columns) -> np.ndarray:
    """The easiest 30 samples first, and one more class in each epoch."""
    return np.argsort(columns["length"], kind="stable")[:30]


ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "shuffled": ("shuffled", {}),
    "weighted": ("weighted", {"weights": "weight", "samples": 70}),
    "weighted once": ("weighted", {"weights": "weight", "replacement": False}),
    "balanced": ("balanced", {}),
    "repeated": ("repeated", {"times": 4}),
    "by length": ("by-length", {"lengths": "length"}),
    "tokens": ("by-length", {"lengths": "length", "buckets": [10, 30, 60], "tokens": 240}),
    "call": ("call", {"call": by_epoch}),
}


def order_of(name: str, **options: Any) -> Order:
    kind, fields = ORDERS[name]
    return ordered(data(**options), kind, fields)


def batches(order: Order, epoch: int) -> list[list[int]]:
    indices_of = order.epoch(epoch)
    return [indices_of(step).tolist() for step in range(order.steps_per_epoch)]


def positions(order: Order, epoch: int) -> list[int]:
    return [position for batch in batches(order, epoch) for position in batch]


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_a_pure_function_with_the_size_that_it_says(name: str) -> None:
    first, second = order_of(name), order_of(name)
    second.epoch(5)
    for epoch in (0, 1, 4):
        parts = batches(first, epoch)
        assert parts == batches(second, epoch)
        assert sum(map(len, parts)) == first.samples
        assert {len(part) for part in parts} == first.batch_sizes
        drawn = positions(first, epoch)
        assert len(set(drawn)) == len(drawn), "occurrences of a sample are numbered"
        assert min(drawn) >= 0
        assert first.repeats or max(drawn) < 50
    assert name == "call" or positions(first, 0) != positions(first, 1)
    assert name == "call" or positions(first, 0) != positions(order_of(name, seed=4), 0)


@pytest.mark.parametrize("name", ORDERS)
def test_a_dropped_remainder_leaves_the_other_batches(name: str) -> None:
    kept, dropped = order_of(name), order_of(name, drop_remainder=True)
    assert dropped.steps_per_epoch == kept.steps_per_epoch - (
        name not in ("repeated", "weighted once")
    )
    if name not in ("by length", "tokens"):  # they shuffle as many batches as there are
        assert batches(dropped, 1) == batches(kept, 1)[: dropped.steps_per_epoch]
    assert dropped.samples == kept.samples


@pytest.mark.parametrize("name", ["weighted", "balanced", "by length", "tokens", "repeated"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_global_batches_do_not_depend_on_replicas_or_resuming(name: str, replicas: int) -> None:
    order = order_of(name)
    alone = list(loader(50, source=SOURCE, order=order, shuffle=False, epochs=2))
    assert [batch.size for batch in alone] == [
        len(part) for e in (0, 1) for part in batches(order, e)
    ]
    shape = {"source": SOURCE, "order": order, "shuffle": False, "epochs": 2, "replicas": replicas}
    together = list(loader(50, **shape, gradient_accumulation_steps=2))
    resumed = list(loader(50, **shape, gradient_accumulation_steps=2, start_step=5))
    assert list(map(samples_of, alone)) == list(map(samples_of, together))
    assert list(map(samples_of, alone))[5:] == list(map(samples_of, resumed))
    for batch in together:
        weights = [(part.count, part.weight) for parts in batch.slices for part in parts]
        assert sum(weight for _, weight in weights) == pytest.approx(replicas)
        assert all(weight == count * replicas / batch.size for count, weight in weights)


def test_weights_decide_how_often_samples_are_drawn() -> None:
    order = ordered(data(), "weighted", {"weights": lambda columns: np.r_[[3.0, 0.0], np.ones(48)]})
    counts = np.bincount(np.concatenate([positions(order, e) for e in range(400)]) % 50)
    assert counts[1] == 0
    expected = 400 * 50 / 51
    assert abs(counts[0] - 3 * expected) < 5 * np.sqrt(3 * expected)
    assert abs(counts[2:] - expected).max() < 5 * np.sqrt(expected)


def test_without_replacement_each_sample_with_a_weight_comes_once_and_heavy_ones_early() -> None:
    order = ordered(
        data(), "weighted", {"weights": lambda _: np.r_[[9.0], np.ones(49)], "replacement": False}
    )
    ranks = [positions(order, epoch).index(0) for epoch in range(300)]
    assert sorted(positions(order, 3)) == list(range(50))
    # Of two samples with weights 9 and 1, the first comes before the other with probability 0.9.
    assert abs(np.mean(ranks) - 4.9) < 5 * np.std(ranks) / np.sqrt(300)
    assert sorted(positions(order_of("weighted once"), 0)) == np.flatnonzero(WEIGHTS).tolist()


def test_classes_are_balanced_in_every_global_batch_and_used_up_in_turn() -> None:
    order = ordered(data(global_batch_size=9), "balanced", {"samples": 45})
    seen = collections.Counter()
    for epoch in range(7):
        for batch in batches(order, epoch):
            drawn = np.array(batch) % 50
            counts = collections.Counter(CLASSES[drawn].tolist())
            assert all(1 <= counts[each] <= 5 for each in (0, 1, 7))
            seen.update(drawn.tolist())
        classes = CLASSES[np.array(positions(order, epoch)) % 50]
        assert np.bincount(classes)[[0, 1, 7]].tolist() == [15] * 3
    for each in (0, 1, 7):
        counts = [seen[sample] for sample in np.flatnonzero(each == CLASSES)]
        assert max(counts) - min(counts) <= 1, "a class is used up before it begins again"


def test_classes_may_be_texts() -> None:
    names = np.array(["cat", "dog", "bird"])[np.searchsorted([0, 1, 7], CLASSES)].tolist()
    renamed = ordered(data(), "balanced", {"by": lambda _: names})
    drawn = np.array(positions(renamed, 0)) % 50
    assert sorted(collections.Counter(CLASSES[drawn].tolist()).values()) == [16, 17, 17]


def test_repeated_samples_are_together_and_have_random_numbers_of_their_own() -> None:
    for batch in batches(order_of("repeated"), 1):
        drawn = np.reshape(batch, (-1, 4))
        assert (drawn % 50 == drawn[:, :1]).all()
        assert (drawn // 50 == [0, 1, 2, 3]).all()

    def noisy(inputs: Any, targets: Any, random: Any) -> Any:
        return random.uniform(), targets

    order = ordered(data(source_of(50)), "repeated", {"times": 4})
    for batch in loader(50, order=order, shuffle=False, transform=noisy):
        drawn = np.concatenate(
            [part.inputs[: part.count] for parts in batch.slices for part in parts]
        )
        assert len(set(drawn.tolist())) == batch.size
        assert len(set(samples_of(batch))) * 4 == batch.size


def test_batches_by_length_have_similar_lengths() -> None:
    def spread(order: Order) -> float:
        return float(np.mean([np.ptp(LENGTHS[batch]) for batch in batches(order, 0)]))

    assert sorted(positions(order_of("by length"), 0)) == list(range(50))
    assert order_of("by length").batch_sizes == {8, 2}
    assert spread(order_of("by length")) < 0.5 * spread(order_of("shuffled"))


def test_a_token_budget_bounds_padded_global_batches() -> None:
    order = order_of("tokens", global_batch_size=16)
    widths = np.array([10, 30, 60])[np.searchsorted([10, 30, 60], LENGTHS)]
    for epoch in range(3):
        assert sorted(positions(order, epoch)) == list(range(50))
        assert all(widths[batch].max() * len(batch) <= 240 for batch in batches(order, epoch))
    assert {8, 4} <= order.batch_sizes


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    size=st.integers(1, 20),
    tokens=st.none() | st.integers(30, 200),
)
def test_any_lengths_are_cut_within_the_bounds(
    lengths: list[int], size: int, tokens: int | None
) -> None:
    column = np.array(lengths)
    samples = data(arrays(column), global_batch_size=size)
    order = ordered(samples, "by-length", {"lengths": "inputs", "tokens": tokens})
    assert sorted(positions(order, 2)) == list(range(len(lengths)))
    for batch in batches(order, 2):
        assert 0 < len(batch) <= size
        assert tokens is None or column[batch].max() * len(batch) <= tokens


def test_lengths_of_entries() -> None:
    ragged = [np.zeros(length) for length in LENGTHS]
    measured = ordered(data(), "by-length", {"lengths": lambda _: ragged})
    assert positions(measured, 0) == positions(order_of("by length"), 0)


def test_columns_of_every_kind_of_data() -> None:
    class Rows:
        targets = CLASSES.tolist()

        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> Any:
            return np.float32(index), self.targets[index]

    class Part:
        dataset, indices = Rows(), [49, 0]

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return self.dataset[self.indices[index]]

    class Table:
        column_names = ("label",)

        def __len__(self) -> int:
            return 50

        def __getitem__(self, key: Any) -> Any:
            return CLASSES if key == "label" else {"label": CLASSES[key]}

    assert Columns(MapStyle(Rows()))["targets"] == CLASSES.tolist()
    assert Columns(MapStyle(Part()))["targets"] == [7, 0]
    assert Columns(BatchIndexed(Table()))["label"] is CLASSES
    assert Columns(class_weighted(SOURCE, {0: 2.0}))["weights"][0] == 2.0
    for source in (SOURCE, MapStyle(Rows())):
        first, _ = split(class_weighted(source, {}), 0.2)
        assert list(Columns(first)["targets"]) == CLASSES[:40].tolist()
    for source, name in ((SOURCE, "y"), (MapStyle(Rows()), "label"), (BatchIndexed(Table()), "x")):
        with pytest.raises(DataError, match=f"the data set has no column '{name}'"):
            Columns(source)[name]


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "negative weights": (
        "weighted",
        {"weights": lambda _: -np.ones(50)},
        "order.weights: expected fin",
    ),
    "too few weights": ("weighted", {"weights": lambda _: np.ones(3)}, "one number for each of 50"),
    "text": ("weighted", {"weights": lambda _: ["a"] * 50}, "expected one number for each"),
    "no classes": ("balanced", {"by": lambda _: np.arange(50) / 7}, "expected classes"),
    "too many": (
        "weighted",
        {"weights": "weight", "replacement": False, "samples": 41},
        "at most the 40",
    ),
    "not a divisor": ("repeated", {"times": 3}, "expected a divisor"),
    "few tokens": ("by-length", {"lengths": "length", "tokens": 20}, "at least 58"),
    "short buckets": (
        "by-length",
        {"lengths": "length", "buckets": [10]},
        "the longest sample has 58",
    ),
    "fractions": ("by-length", {"lengths": "x"}, "expected lengths, whole numbers"),
    "no positions": ("call", {"call": lambda *_: [[1]]}, r"received int64 of shape \[1, 1\]"),
    "outside": ("call", {"call": lambda *_: [50]}, "expected positions from 0 to 49, received 50"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str) -> None:
    kind, options, message = FAULTS[name]
    with pytest.raises(DataError, match=message):
        ordered(data(), kind, options)


def test_an_order_of_varying_length_is_refused() -> None:
    order = ordered(data(), "call", {"call": lambda seed, epoch, *_: np.arange(10 + epoch)})
    with pytest.raises(DataError, match="received 10 for epoch 0 and 12 for epoch 2"):
        order.epoch(2)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_occurrences_are_numbered_in_order(drawn: list[int]) -> None:
    seen: collections.Counter[int] = collections.Counter()
    for position, number in zip(drawn, numbered(np.array(drawn), 5).tolist(), strict=True):
        assert number == position + 5 * seen[position]
        seen[position] += 1


def test_ratios_hold_in_every_stretch() -> None:
    parts = [(30, np.arange(30).__getitem__), (20, np.arange(30, 50).__getitem__)]
    order = interleaved(data(global_batch_size=10), parts, [4, 1], samples=100)
    for batch in batches(order, 0):
        assert 1 <= sum(position % 50 >= 30 for position in batch) <= 3
    assert sum(position % 50 >= 30 for position in positions(order, 0)) == 20


@given(length=st.integers(2, 5000), seed=st.integers(0, 2**32))
def test_a_bijection_holds_each_position_once(length: int, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(2**64, size=8, dtype=np.uint64)
    drawn = Bijection(length, keys)[0 : length + 5]
    assert drawn.dtype == np.int64
    assert sorted(drawn.tolist()) == list(range(length))
    assert Bijection(length, keys)[1:7].tolist() == drawn[1:7].tolist()


@pytest.mark.slow
def test_a_bijection_is_near_to_a_uniform_shuffle() -> None:
    counts = np.zeros((50, 50))
    for seed in range(4000):
        counts[np.arange(50), Bijection(50, _keys(seed))[0:50]] += 1
    deviations = (counts - 80) / np.sqrt(80)
    assert np.abs(deviations).max() < 5
    assert 0.9 < np.mean(deviations**2) < 1.06
    # neighbours in the epoch are unrelated in the data set
    long = Bijection(10**9, _keys(0))[10**6 : 10**6 + 20_000].astype(float)
    assert abs(np.corrcoef(long[1:], long[:-1])[0, 1]) < 5 / np.sqrt(20_000)
    assert abs(np.corrcoef(long, np.arange(20_000))[0, 1]) < 5 / np.sqrt(20_000)


def _keys(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**64, size=8, dtype=np.uint64)


def test_long_orders_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Huge:
        def __len__(self) -> int:
            return 10**9

    long = permutation(0, (0,), 10**9)
    assert long[5:9].tolist() != permutation(0, (1,), 10**9)[5:9].tolist()
    read = [long[start : start + 3000].tolist() for start in (0, 3000, 14000, 15000, 4000)]
    assert read[2][1000:] == read[3][:2000], "blocks begin anywhere"
    assert read[4] == permutation(0, (0,), 10**9)[4000:7000].tolist()
    for order in (ordered(data(Huge()), "shuffled", {}), sequential(data(Huge()))):
        last = order.epoch(3)(order.steps_per_epoch - 1)
        assert len(last) == 8
        assert last.max() < 10**9
    monkeypatch.setattr(permutations, "LARGEST_IN_MEMORY", 10)
    assert sorted(positions(order_of("repeated"), 0)) == list(range(200))
    assert sorted(positions(order_of("shuffled"), 0)) == list(range(50))
    for name in ORDERS:
        assert len(positions(order_of(name), 2)) == order_of(name).samples


class Numbers:
    """A map-style data set of so many samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.float32, int]:
        return np.float32(index), index % 10


def cost_of_the_first_batch(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Peak of memory in bytes, and positions that are computed, up to the first global batch of an epoch."""
    computed: list[int] = []

    class Counted(Bijection):
        def _encrypted(self, values: np.ndarray) -> np.ndarray:
            computed.append(len(values))
            return super()._encrypted(values)

    monkeypatch.setattr(permutations, "Bijection", Counted)
    source = MapStyle(Numbers(length))
    tracemalloc.start()
    try:
        order = ordered(data(source), kind, {})
        options = {"source": source, "order": order, "shuffle": False, "epochs": 2}
        made = loader(length, **options, start_step=order.steps_per_epoch)
        (batch,) = itertools.islice(made, 1)
        assert (batch.epoch, batch.index, len(samples_of(batch))) == (1, 0, 8)
        return tracemalloc.get_traced_memory()[1], sum(computed)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["shuffled", "sequential"])
def test_a_billion_samples_cost_no_more_than_a_million(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost_of_the_first_batch(kind, 10**9, monkeypatch)  # imports what it needs
    million, _ = cost_of_the_first_batch(kind, 10**6, monkeypatch)
    billion, computed = cost_of_the_first_batch(kind, 10**9, monkeypatch)
    assert billion <= min(2 * 2**20, max(million, 2**18))
    assert computed <= 2**16
    assert (computed > 0) == (kind == "shuffled")


def test_epoch_steps_divide_the_run_and_not_the_passes() -> None:
    passes = list(loader(20, epochs=3))
    cut = list(loader(20, epochs=2, epoch_steps=4))
    assert list(map(samples_of, cut)) == list(map(samples_of, passes))[:8]
    assert [(b.epoch, b.index, b.is_last_of_epoch) for b in cut] == [
        (step // 4, step % 4, step % 4 == 3) for step in range(8)
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_the_first_batch_of_a_pass_has_a_fingerprint_to_compare(name: str) -> None:
    order = order_of(name)
    made = loader(50, source=SOURCE, order=order, shuffle=False, epochs=2, start_step=1)
    fingerprints = [batch.fingerprint for batch in made]
    steps = order.steps_per_epoch
    if name == "shuffled":
        assert set(fingerprints) == {None}
        return
    found = [step + 1 for step, each in enumerate(fingerprints) if each is not None]
    assert found == [1, steps], "where a run resumes, and where a pass begins"
    assert fingerprints[0] == order.fingerprint(order.epoch(0)(1))
    assert fingerprints[0] != order.fingerprint(order.epoch(0)(1)[::-1])
