"""Torch's `DataLoader` as the source of samples or of batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from unit.data.stream_samples import INPUTS, TARGETS, Pairs, given_by

from isotrain.core.data.arrays import ArraySource, arrays
from isotrain.core.data.map_style import MapStyle
from isotrain.core.data.order.samples import Samples
from isotrain.core.data.sources import as_source, sample_stream, source_workers
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.data.subset import class_weighted, split
from isotrain.core.errors import DataError


class Endless(IterableDataset):
    """An iterable-style data set."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        return iter(zip(INPUTS, TARGETS, strict=True))


def gathered(source: object) -> tuple[list, list]:
    inputs, targets = source.gather(np.array([4, 0, 19]))
    return np.asarray(inputs).tolist(), np.asarray(targets).tolist()


def test_samples_of_a_torch_loader_are_gathered():
    expected = (INPUTS[[4, 0, 19]].tolist(), [4, 0, 19])
    tensors = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    together = as_source(DataLoader(tensors, batch_size=3, shuffle=True))
    assert isinstance(together, ArraySource)
    assert gathered(together) == expected
    single = as_source(DataLoader(Pairs(), batch_size=3))
    assert isinstance(single, MapStyle)
    assert gathered(single) == expected


def test_workers_of_a_loader_are_taken_over():
    source = as_source(DataLoader(Pairs(), batch_size=3, num_workers=2, prefetch_factor=5))
    for part in split(source, 0.25):
        settings = source_workers(class_weighted(part, {0: 2.0}))
        assert (settings.count, settings.prefetch, settings.start) == (2, 5, "spawn")
    tensors = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    for without in (DataLoader(tensors, num_workers=2), DataLoader(Pairs()), (INPUTS, TARGETS)):
        assert source_workers(as_source(without)) is None


def test_a_collate_function_is_used():
    def collate(samples):
        inputs, targets = zip(*samples, strict=True)
        return [torch.from_numpy(np.stack(inputs)), torch.zeros(len(targets))], np.array(targets)

    inputs, targets = as_source(DataLoader(Pairs(), collate_fn=collate)).gather(np.array([2, 1]))
    assert isinstance(inputs, tuple)
    assert (inputs[0].tolist(), targets.tolist()) == (INPUTS[[2, 1]].tolist(), [2, 1])


def test_a_torch_loader_with_a_custom_order_is_a_stream():
    for torch_loader in (
        DataLoader(Pairs(), sampler=list(range(20)), batch_size=3),
        DataLoader(Endless(), batch_size=3),
    ):
        source = as_source(torch_loader)
        assert isinstance(source, BatchStream)
        assert (source.notes != []) == isinstance(torch_loader.dataset, Pairs)
        assert given_by(source) == given_by(arrays(INPUTS, TARGETS))


def even_targets(samples: list[tuple]) -> object:
    """A collate function that drops samples, as users drop broken ones."""
    kept = [(inputs, target) for inputs, target in samples if target % 2 == 0]
    return default_collate(kept)


def test_samples_that_collate_drops_are_not_counted():
    sampler = list(range(20))
    torch_loader = DataLoader(Pairs(), sampler=sampler, batch_size=4, collate_fn=even_targets)
    assert len(as_source(torch_loader)) == 10
    assert given_by(as_source(torch_loader)) == given_by(arrays(INPUTS[::2], TARGETS[::2]))


def test_an_iterable_data_set_of_torch_gives_samples() -> None:
    options = {"global_batch_size": 6, "replicas": 2}
    for source in (as_source(Endless()), sample_stream(lambda: iter(Endless()), samples=20)):
        assert isinstance(source, BatchStream)
        assert given_by(source, **options) == given_by(arrays(INPUTS, TARGETS), **options)


def test_samples_that_are_dicts_have_names() -> None:
    def named() -> Iterator[dict[str, object]]:
        for inputs, target in Endless():
            yield {"text": "not chosen", "x": inputs, "y": target}

    expected = given_by(arrays(INPUTS, TARGETS))
    assert given_by(sample_stream(named, inputs="x", targets="y")) == expected
    with pytest.raises(DataError, match="Did you mean 'y'"):
        given_by(sample_stream(named, inputs="x", targets="yy"))


def test_samples_are_made_batches_by_collate() -> None:
    def halved(samples: list[tuple]) -> object:
        inputs, targets = default_collate(samples)
        return inputs / 2, targets

    source = sample_stream(Endless(), collate=halved)
    assert given_by(source) == given_by(arrays(INPUTS / 2, TARGETS))


def test_samples_by_position_are_no_stream_of_samples() -> None:
    with pytest.raises(DataError, match=r"Pairs has its samples by position.*MapStyle"):
        sample_stream(Pairs())


SAMPLERS = {
    "some": (RandomSampler(Pairs(), num_samples=7), 7),
    "more": (RandomSampler(Pairs(), num_samples=45), 45),
    "drawn": (RandomSampler(Pairs(), replacement=True), 20),
    "weighted": (WeightedRandomSampler([1.0] * 19 + [30.0], 21), 21),
    "weighted once": (WeightedRandomSampler([0.0] + [1.0] * 19, 5, replacement=False), 5),
    "subset": (SubsetRandomSampler([4, 19, 0]), 3),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("in_batches", [False, True])
def test_samplers_of_torch_are_orders(name: str, in_batches: bool) -> None:
    sampler, count = SAMPLERS[name]
    batched = {"batch_sampler": BatchSampler(sampler, 3, drop_last=False)}
    options = batched if in_batches else {"sampler": sampler, "batch_size": 3}
    source = class_weighted(as_source(DataLoader(Pairs(), **options)), {})
    assert source.order is not None
    order = source.order(Samples.of(source, global_batch_size=count, seed=3, drop_remainder=False))
    assert (order.samples, order.steps_per_epoch) == (count, 1)
    drawn = [order.epoch(epoch)(0) for epoch in range(30)]
    assert len({tuple(each) for each in drawn}) > 5
    counts = np.bincount(np.concatenate(drawn) % 20, minlength=20)
    if name == "subset":
        assert counts[[4, 19, 0]].tolist() == [30, 30, 30]
    if name in ("some", "more"):
        assert np.ptp(counts) <= 1, "all samples are used before one is again"
    if name == "weighted":
        assert counts[19] > 5 * counts[:19].max()
    if name == "weighted once":
        assert counts[0] == 0
        assert all(len(set(each % 20)) == 5 for each in drawn)
    with pytest.raises(DataError, match="validation_split: the data have an order of their own"):
        split(source, 0.5)


@pytest.mark.parametrize("sampler", [SequentialSampler(Pairs()), RandomSampler(Pairs())])
def test_samplers_that_only_shuffle_leave_the_order_to_the_spec(sampler: object) -> None:
    batches = BatchSampler(sampler, 3, drop_last=False)  # type: ignore[arg-type]
    source = as_source(DataLoader(Pairs(), batch_sampler=batches))
    assert isinstance(source, MapStyle)
    assert source.order is None
