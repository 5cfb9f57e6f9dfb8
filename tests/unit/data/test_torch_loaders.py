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
    TensorDataset,
    default_collate,
)
from unit.data.stream_samples import INPUTS, TARGETS, Pairs, given_by

from isotrain.core.data.arrays import ArraySource, arrays
from isotrain.core.data.map_style import MapStyle
from isotrain.core.data.sources import as_source, source_notes
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


def test_unused_workers_are_noted():
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


def test_a_torch_loader_with_a_custom_order_is_a_stream():
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
    """A collate function that drops samples, as users drop broken ones."""
    kept = [(inputs, target) for inputs, target in samples if target % 2 == 0]
    return default_collate(kept)


def test_samples_that_collate_drops_are_not_counted():
    sampler = list(range(20))
    torch_loader = DataLoader(Pairs(), sampler=sampler, batch_size=4, collate_fn=even_targets)
    assert len(as_source(torch_loader)) == 10
    assert given_by(as_source(torch_loader)) == given_by(arrays(INPUTS[::2], TARGETS[::2]))


def test_an_iterable_data_set_of_torch_needs_a_loader() -> None:
    with pytest.raises(DataError, match=r"DataLoader\(Endless\(...\), batch_size=N\)"):
        as_source(Endless())


@pytest.mark.parametrize("options", [{"num_samples": 7}, {"replacement": True}])
def test_a_torch_loader_with_a_random_sampler_option_is_a_stream(options):
    drawn = RandomSampler(Pairs(), **options)
    source = as_source(DataLoader(Pairs(), sampler=drawn, batch_size=3))
    assert isinstance(source, BatchStream)
    assert len(source) == drawn.num_samples
