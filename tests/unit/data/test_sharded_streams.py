"""Streams that give each replica its own samples."""

from __future__ import annotations

import numpy as np
import pytest
from unit.data.loaded_batches import facts, loader, samples

from isotrain.core.data import sampler
from isotrain.core.data.loader import Loader
from isotrain.core.errors import DataError

# Streams


class Stream:
    """Replica r of n gives 10 * epoch + its share of 0 .. 5, as many times as `batches` says."""

    def __init__(self, batches: int = 4, promised: int = 4, size: int = 6) -> None:
        self.batches, self.promised, self.size = batches, promised, size

    def __len__(self) -> int:
        return self.promised

    def iterate(self, *, epoch, seed, replica, replicas):
        assert seed == 5
        start, stop = sampler.slice_bounds(self.size, replicas, replica)
        for number in range(self.batches):
            values = 1000 * epoch + 100 * number + np.arange(start, stop)
            yield values[:, None], values


def stream(replicas: int = 4, **options) -> Loader:
    given = {
        "source": Stream(),
        "global_batch_size": 6,
        "replicas": replicas,
        "epochs": 2,
    } | options
    return loader(0, **given)


@pytest.mark.parametrize("replicas", [1, 2, 4, 6])
def test_streams_give_their_batches(replicas):
    batches = list(stream(replicas, gradient_accumulation_steps=2))
    assert [(b.epoch, b.index, b.step) for b in batches] == [
        (step // 4, step % 4, step) for step in range(8)
    ]
    for batch in batches:
        base = 1000 * batch.epoch + 100 * batch.index
        assert samples(batch) == [base + i for i in range(6)]
        weights = [p.weight for micro_batches in batch.slices for p in micro_batches]
        assert sum(weights) == pytest.approx(replicas)


def test_streams_resume_and_stop():
    whole = [facts(batch) for batch in stream(steps=7)]
    assert len(whole) == 7
    for start in range(8):
        assert [facts(b) for b in stream(steps=7, start_step=start)] == whole[start:]


def test_stream_augmentation_is_equal_whatever_the_split():
    def jitter(inputs, targets, random):
        return inputs + random.uniform()[:, None], targets

    def seen(replicas):
        batches = stream(replicas, transform=jitter)
        micro_batches = (p for b in batches for s in b.slices for p in s)
        return [row.tolist() for p in micro_batches for row in p.inputs[: p.count]]

    assert seen(1) == seen(4)
    drawn = {row[0] % 1.0 for row in seen(1)}
    assert len(drawn) == 2 * 4 * 6


def test_a_stream_that_ends_early_is_an_error():
    with pytest.raises(DataError, match="replica 0 ended after 3 local batches of epoch 0"):
        list(stream(source=Stream(batches=3)))


def test_a_partial_local_batch_of_a_stream_is_an_error():
    with pytest.raises(DataError, match=r"expected 2 rows"):
        list(stream(source=Stream(size=4)))


def test_a_stream_needs_a_sample_for_each_replica():
    with pytest.raises(DataError, match="each of 7 replicas, received 6"):
        stream(7)
