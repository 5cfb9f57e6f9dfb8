"""Several data sets as one: mixed by ratios, in turn, or joined to rows."""

from __future__ import annotations

import collections
import tracemalloc
from typing import Any

import numpy as np
import pytest
from unit.data.loaded_batches import loader

from isotrain.core.data.collate import Padding
from isotrain.core.data.map_style import MapStyle, with_collate
from isotrain.core.data.order.order import Order, shuffled
from isotrain.core.data.order.samples import Columns, Samples
from isotrain.core.data.pytree import Weighted
from isotrain.core.data.sources import arrays, joined, mixture, stream
from isotrain.core.data.subset import class_weighted, split
from isotrain.core.errors import DataError

WEB = np.arange(30)
BOOKS = np.arange(100, 110)


def pairs(numbers: np.ndarray, name: str = "x") -> Any:
    return arrays({name: numbers.astype(float)}, numbers)


def mixed(ratios: dict[str, float] | None = None, **options: Any) -> Any:
    return mixture({"web": pairs(WEB), "books": pairs(BOOKS)}, ratios, **options)


def order_of(source: Any, **options: Any) -> Order:
    chosen = {"global_batch_size": 10, "seed": 1, "drop_remainder": False} | options
    return source.order(Samples.of(source, **chosen))


def targets(source: Any, order: Order, epochs: int = 1, **options: Any) -> list[list[int]]:
    batches = loader(
        1, source=source, order=order, shuffle=False, global_batch_size=10, epochs=epochs, **options
    )
    found = []
    for batch in batches:
        parts = [part for parts in batch.slices for part in parts]
        for part in parts:
            assert part.inputs["x"].tolist() == part.targets.tolist()
        found.append([int(each) for part in parts for each in part.targets[: part.count]])
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [each for batch in batches for each in batch]


@pytest.mark.parametrize("replicas", [1, 3])
def test_ratios_hold_in_every_global_batch(replicas: int) -> None:
    source = mixed({"web": 3, "books": 1})
    order = order_of(source)
    batches = targets(source, order, 6, replicas=replicas)
    assert order.samples == len(source) == 40
    assert all(1 <= sum(each >= 100 for each in batch) <= 4 for batch in batches)
    assert sum(each >= 100 for batch in batches for each in batch) == 60
    counts = collections.Counter(flat(batches))
    assert set(counts.values()) == {6}, "30 of 40 from 30, 10 from 10"
    once = mixed({"web": 1, "books": 1}, samples=20)
    counts = collections.Counter(flat(targets(once, order_of(once), 4, replicas=replicas)))
    assert {counts[each] for each in BOOKS} == {4}
    assert {counts[each] for each in WEB} == {1, 2}


def test_without_ratios_the_spec_decides() -> None:
    source = mixed()
    assert source.order is None
    assert sorted(flat(targets(source, None))) == [*WEB, *BOOKS]
    assert Columns(source)["targets"] == [*WEB, *BOOKS]


@pytest.mark.parametrize("shuffle", [True, False])
def test_in_turn(shuffle: bool) -> None:
    source = mixed(in_turn=True)
    epochs = targets(source, order_of(source, shuffle=shuffle), 2)
    assert all(sorted(flat(epochs[start : start + 3])) == [*WEB] for start in (0, 4))
    assert sorted(epochs[3]) == sorted(epochs[7]) == [*BOOKS]
    assert (epochs[3] != epochs[7]) is shuffle
    assert (epochs[3] == [*BOOKS]) is not shuffle


def test_ratios_without_shuffling_keep_the_order_of_each_part() -> None:
    source = mixed({"web": 1, "books": 1})
    drawn = flat(targets(source, order_of(source, shuffle=False)))
    assert [each for each in drawn if each < 100] == [*range(20)]
    assert [each for each in drawn if each >= 100] == [*BOOKS, *BOOKS]


@pytest.mark.parametrize(("rows", "count"), [("longest", 30), ("shortest", 10), (17, 17)])
def test_joined_rows_have_a_sample_of_each(rows: Any, count: int) -> None:
    source = joined({"web": pairs(WEB, "w"), "books": pairs(BOOKS, "b")}, rows=rows)
    order = order_of(source)
    pairs_seen, counts = set(), collections.Counter()
    for batch in loader(
        1, source=source, order=order, shuffle=False, global_batch_size=5, epochs=6
    ):
        for part in (part for parts in batch.slices for part in parts):
            web, books = part.targets["web"], part.targets["books"]
            assert part.inputs["web"]["w"].tolist() == web.tolist()
            assert part.inputs["books"]["b"].tolist() == books.tolist()
            pairs_seen |= set(zip(web.tolist(), books.tolist(), strict=True))
            counts.update([*web.tolist(), *books.tolist()])
    assert (len(source), order.samples) == (count, count)
    assert len(pairs_seen) > 3 * count, "other samples meet in every epoch"
    for part in (WEB, BOOKS):
        assert np.ptp([counts[each] for each in part]) <= 1
    inputs, _ = source.gather(np.array([9, 3]))
    assert inputs["books"]["b"].tolist() == [109, 103], "in order, as in evaluation"


def test_sample_weights_and_missing_targets_of_joined_parts() -> None:
    weighted = arrays(WEB, Weighted(WEB, WEB * 2.0))
    _, all_targets = joined({"a": weighted, "b": pairs(BOOKS)}).gather(np.array([3]))
    assert isinstance(all_targets, Weighted)
    assert (all_targets.weights["a"][0], all_targets.weights["b"][0]) == (6.0, 1.0)
    _, some = joined({"a": arrays(WEB), "b": pairs(BOOKS)}).gather(np.array([3]))
    assert list(some) == ["b"]
    assert joined({"a": arrays(WEB)}).gather(np.array([3]))[1] is None


def test_mixed_parts_may_have_weights() -> None:
    source = class_weighted(mixed({"web": 1, "books": 1}), {100: 5.0})
    assert source.order is not None
    _, all_targets = source.gather(np.array([30, 2]))
    assert all_targets.weights.tolist() == [5.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mixed({"web": 1}), "expected a ratio above 0 for each of web, books"),
        (lambda: mixed({"web": 1, "books": 0}), "expected a ratio above 0"),
        (lambda: mixed(samples=3), "`samples` needs `ratios`"),
        (lambda: mixed({"web": 1, "books": 1}, in_turn=True), "leave one of the two out"),
        (lambda: mixture({}), "expected data sets by name, received none"),
        (lambda: joined({"a": stream(lambda: iter([]), 3)}), "a is a stream"),
        (lambda: joined({"a": mixed({"web": 1, "books": 1})}), "a has an order of its own"),
        (lambda: split(mixed(in_turn=True), 0.5), "validation_split"),
        (lambda: joined(dict.fromkeys("abcdefghijklmno", pairs(WEB))), "expected at most 2\\^62"),
        (
            lambda: mixture({"a": pairs(WEB), "b": pairs(BOOKS, "y")}).gather(np.array([0, 35])),
            "the samples of a, b differ in structure or shape: KeyError: 'x'",
        ),
    ],
)
def test_faults_are_named(make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def texts(lengths: list[int], first: int) -> list[dict[str, np.ndarray]]:
    """Texts of these lengths, which consist of their number."""
    return [{"x": np.full(length, first + n), "y": n} for n, length in enumerate(lengths)]


def test_slices_of_a_padded_mixture_are_of_samples_of_several_data_sets() -> None:
    padding = Padding({"x": -1})
    parts = {
        "web": MapStyle(texts([1, 2, 3, 4], 0), inputs="x", targets="y"),
        "books": MapStyle(texts([6, 7], 10), inputs="x", targets="y"),
    }
    source = with_collate(mixture(parts, {"web": 1, "books": 1}), padding)
    assert source.order is not None
    assert source.collates
    inputs, targets = source.gather(np.array([5, 1, 4]))
    assert inputs.tolist() == [[11] * 7, [1] * 2 + [-1] * 5, [10] * 6 + [-1]]
    assert targets.tolist() == [1, 1, 0]
    assert list(map(len, Columns(source)["x"])) == [1, 2, 3, 4, 6, 7]
    rows = with_collate(joined(parts), padding)
    assert rows.collates
    inputs, _ = rows.gather(np.array([0, 3]))
    assert inputs["web"].shape == (2, 4)
    assert inputs["books"].shape == (2, 7)


@pytest.mark.parametrize(
    ("kind", "peak"), [("plain", 8), ("in turn", 16), ("joined", 32), ("ratios", 84)]
)
def test_the_order_takes_as_much_memory_as_the_page_says(kind: str, peak: int) -> None:
    samples = 200_000
    parts = {"web": pairs(np.arange(150_000)), "books": pairs(np.arange(50_000))}
    source: Any = {
        "plain": lambda: mixture(parts),
        "in turn": lambda: mixture(parts, in_turn=True),
        "joined": lambda: joined(parts, rows=samples),
        "ratios": lambda: mixture(parts, {"web": 2, "books": 1}),
    }[kind]()
    data = Samples.of(source, global_batch_size=8, seed=1, drop_remainder=False)
    order = (source.order or shuffled)(data)
    order.epoch(0)(0)  # imports what it needs
    tracemalloc.start()
    try:
        batches = order.epoch(1)
        batches(0)
        held, most = (size / samples for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert held < 10
    assert most < 1.2 * peak


def test_parts_of_lists_of_samples_are_columns() -> None:
    assert list(Columns(MapStyle(texts([1, 2], 0)))["y"]) == [0, 1]
    pairs = MapStyle([(np.ones(3), 5), (np.ones(2), 6)])
    assert Columns(pairs)["targets"] == [5, 6]
    assert list(map(len, Columns(pairs)["inputs"])) == [3, 2]
    assert Columns(MapStyle([1.0, 2.0]))["inputs"] == [1.0, 2.0]
    for source, name in ((pairs, "x"), (MapStyle([(1.0,)]), "targets"), (MapStyle([1.0]), "y")):
        with pytest.raises(DataError, match="no column"):
            Columns(source)[name]


def test_a_sample_too_few_goes_to_the_largest_remainder() -> None:
    """Thirds of 10 samples are 3.33 and 6.67, and rounded 3 and 7."""
    source = mixed({"web": 2, "books": 1}, samples=10)
    (batch,) = targets(source, order_of(source))
    assert sum(each < 100 for each in batch) == 7
