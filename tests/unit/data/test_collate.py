"""Batches of samples whose lengths and parts differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from unit.data.loaded_batches import loader

from isotrain.core.data.arrays import arrays
from isotrain.core.data.collate import Padding
from isotrain.core.data.dataset import DataSet, changed
from isotrain.core.data.map_style import BatchIndexed, MapStyle, with_collate
from isotrain.core.data.pytree import Weighted
from isotrain.core.data.sources import as_source, collates, sample_stream, stream
from isotrain.core.data.subset import class_weighted, split
from isotrain.core.errors import DataError

LENGTHS = [3, 1, 4, 1, 5, 2, 6]
ROWS = np.array([1, 4, 0])


def tokens(index: int) -> np.ndarray:
    return np.arange(1, LENGTHS[index] + 1) * 10 + index


class Pairs:
    """Sample i has LENGTHS[i] tokens, and the target i."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return tokens(index), index


class Named(Pairs):
    """Dicts with a field that nothing uses, and that cannot be stacked."""

    def __getitem__(self, index: int) -> Any:
        return {"tokens": tokens(index), "label": index, "text": b"..."}


@dataclasses.dataclass
class Sample:
    tokens: np.ndarray
    count: int
    hint: float | None = None


class Objects(Pairs):
    def __getitem__(self, index: int) -> Any:
        return Sample(tokens(index), index)


def padded(source: Any, **options: Any) -> Any:
    return with_collate(as_source(source), Padding(**options)).gather(ROWS)


@pytest.mark.parametrize(
    ("options", "length"),
    [({}, 5), ({"multiple": 4}, 8), ({"multiple": 5}, 5), ({"length": 7}, 7)],
)
def test_parts_are_padded_to_a_length(options: dict[str, int], length: int) -> None:
    inputs, targets = padded(Pairs(), values={"inputs": -1}, **options)
    assert inputs.shape == (3, length)
    assert inputs.dtype == tokens(0).dtype
    for row, index in zip(inputs, ROWS, strict=True):
        np.testing.assert_array_equal(row[: LENGTHS[index]], tokens(index))
        assert set(row[LENGTHS[index] :]) <= {-1}
    np.testing.assert_array_equal(targets, ROWS)


def test_a_sample_longer_than_the_fixed_length_is_named() -> None:
    with pytest.raises(DataError, match="inputs of sample 4 has length 5, and all are padded to 4"):
        padded(Pairs(), values={"inputs": 0}, length=4)


def test_lengths_that_differ_without_padding_are_refused_with_what_to_write() -> None:
    with pytest.raises(DataError, match=r"`collate: \{pad: \{inputs: 0\}\}` in the spec"):
        as_source(Pairs()).gather(ROWS)
    with pytest.raises(DataError, match=r"inputs\['tokens'\].*`collate: \{pad: \{tokens: 0\}\}`"):
        as_source(Objects()).gather(ROWS)


def test_parts_are_padded_by_name() -> None:
    source = MapStyle(Named(), inputs="tokens", targets="label")
    inputs, targets = padded(source, values={"tokens": 0})
    assert inputs.shape == (3, 5)
    np.testing.assert_array_equal(targets, ROWS)
    inputs, targets = padded(Objects(), values={"tokens": 0})
    assert inputs["tokens"].shape == (3, 5)
    assert list(inputs) == ["tokens", "count"], "a part that no sample has is left out"
    assert targets is None


def test_tuples_and_sample_weights_are_padded_by_position_and_name() -> None:
    class Several(Pairs):
        def __getitem__(self, index: int) -> Any:
            words = tokens(index)
            return (words, index), words, np.ones(len(words))

    values = {"inputs[0]": 0, "targets": -1, "sample_weights": 0.0}
    inputs, targets = padded(Several(), values=values)
    assert [part.shape for part in inputs] == [(3, 5), (3,)]
    assert isinstance(targets, Weighted)
    np.testing.assert_array_equal((targets.targets != -1), targets.weights == 1)


def test_a_part_that_only_some_samples_have_is_refused() -> None:
    class Some(Pairs):
        def __getitem__(self, index: int) -> Any:
            return Sample(np.zeros(2), index, hint=None if index == 4 else 1.0)

    with pytest.raises(DataError, match=r"inputs\['hint'\]: samples 1 and 4 differ in whether"):
        as_source(Some()).gather(ROWS)

    class Shorter(Pairs):
        def __getitem__(self, index: int) -> Any:
            return ((index,) * (1 + index % 2),)

    with pytest.raises(DataError, match="samples 1 and 4 differ in the number of parts"):
        as_source(Shorter()).gather(ROWS)


def test_a_function_gets_the_samples_as_they_are() -> None:
    received: list[Any] = []

    class Texts(Pairs):
        def __getitem__(self, index: int) -> Any:
            return Sample(b"\xff", index), "label"

    def collate(samples: list[Any]) -> Any:
        received.extend(samples)
        return np.zeros((len(samples), 2)), np.ones(len(samples))

    inputs, targets = with_collate(as_source(Texts()), collate).gather(ROWS)
    assert inputs.shape == (3, 2)
    assert targets.shape == (3,)
    assert received == [(Sample(b"\xff", index), "label") for index in ROWS]


def test_columns_become_samples() -> None:
    class Columns(Pairs):
        def __getitem__(self, rows: Any) -> Any:
            return {"tokens": [tokens(i) for i in rows], "label": rows, "text": ["..."] * len(rows)}

    source = BatchIndexed(Columns(), inputs="tokens", targets="label")
    inputs, targets = padded(source, values={"tokens": 0})
    assert inputs.shape == (3, 5)
    np.testing.assert_array_equal(targets, ROWS)


def test_rows_of_arrays_are_padded_too() -> None:
    values = np.arange(14).reshape(7, 2)
    source = arrays({"a": values}, Weighted(values, np.arange(7)))
    inputs, targets = padded(source, values={"a": 0}, multiple=4)
    np.testing.assert_array_equal(inputs["a"], np.pad(values[ROWS], [(0, 0), (0, 2)]))
    np.testing.assert_array_equal(targets.weights, ROWS)
    inputs, targets = padded(arrays(values), values={})
    assert targets is None


class Custom:
    def __len__(self) -> int:
        return 2

    def gather(self, indices: Any) -> Any:
        return np.zeros((len(indices), 2)), None


def test_samples_of_a_stream_are_padded_to_the_width_of_their_global_batch() -> None:
    def samples() -> Any:
        yield from (Pairs()[index] for index in range(len(LENGTHS)))

    source = with_collate(sample_stream(samples, samples=len(LENGTHS)), Padding({"inputs": 0}))
    assert widths(source, replicas=2) == [[[5], [5]], [[6], [6]]]


def test_samples_of_a_stream_that_are_padded_are_not_counted() -> None:
    source = with_collate(sample_stream(lambda: iter(Pairs())), Padding({"inputs": 0}))
    with pytest.raises(DataError, match=r"sample_stream\(\.\.\., samples=N\), or `epoch_steps`"):
        widths(source)


def test_batches_cannot_be_collated() -> None:
    def batches() -> Any:
        yield np.zeros((2, 2)), np.zeros(2)

    with pytest.raises(DataError, match=r"collate: .* the stream gives batches"):
        with_collate(stream(batches, 2), Padding({"inputs": 0}))
    with pytest.raises(DataError, match=r"collate: .* Custom gives batches"):
        with_collate(Custom(), Padding({"inputs": 0}))
    own = as_source(DataLoader(Pairs(), batch_size=2, collate_fn=list))
    with pytest.raises(DataError, match="a collate function already"):
        with_collate(own, Padding({"inputs": 0}))


def test_all_parts_of_a_data_set_are_changed() -> None:
    data = changed(DataSet(1, None, {"a": 2}), lambda part: part + 1)
    assert data == DataSet(2, None, {"a": 3})


def widths(source: Any, **options: Any) -> list[list[list[int]]]:
    """Widths of the slices, by global batch and replica."""
    batches = loader(0, source=source, shuffle=False, global_batch_size=6, **options)
    return [
        [[each.inputs.shape[1] for each in slices] for slices in batch.slices] for batch in batches
    ]


@pytest.mark.parametrize("kind", ["padding", "function"])
def test_each_slice_is_made_of_its_own_samples(kind: str) -> None:
    def collate(samples: list[Any]) -> Any:
        words, targets = zip(*samples, strict=True)
        tensors = [torch.from_numpy(each) for each in words]
        rows = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        return rows, torch.tensor(targets)

    if kind == "padding":
        source: Any = with_collate(as_source(Pairs()), Padding({"inputs": 0}))
    else:
        source = as_source(DataLoader(Pairs(), batch_size=2, collate_fn=collate))
    assert collates(source)
    assert widths(source) == [[[5]], [[6]]]
    assert widths(source, replicas=2) == [[[4], [5]], [[6], [6]]]
    accumulated = widths(source, replicas=2, gradient_accumulation_steps=3)
    assert accumulated == [[[3, 1, 4], [1, 5, 2]], [[6, 6, 6], [6, 6, 6]]]
    weighted = class_weighted(source, {1: 2.0})
    first, _ = split(source, 1 / 7)
    assert collates(weighted)
    assert widths(weighted, replicas=3) == [[[3], [4], [5]], [[6], [6], [6]]]
    assert widths(first, replicas=3) == [[[3], [4], [5]]]


def test_samples_do_not_depend_on_the_slices() -> None:
    source = with_collate(as_source(Pairs()), Padding({"inputs": 0}))

    def transform(inputs: Any, targets: Any, random: Any) -> Any:
        return inputs * random.integers(1, 100)[:, None], targets

    def seen(**options: Any) -> list[list[int]]:
        batches = loader(0, source=source, global_batch_size=5, transform=transform, **options)
        return [
            [int(word) for word in row if word]
            for batch in batches
            for slices in batch.slices
            for each in slices
            for row in each.inputs[: each.count]
        ]

    expected = seen()
    assert sorted(map(len, expected)) == sorted(LENGTHS)
    for replicas in (2, 3):
        assert seen(replicas=replicas, gradient_accumulation_steps=2) == expected


def test_stacking_of_torch_itself_makes_whole_local_batches() -> None:
    samples = [(np.zeros(2), 0)] * 4
    assert not collates(as_source(DataLoader(samples, batch_size=2)))
