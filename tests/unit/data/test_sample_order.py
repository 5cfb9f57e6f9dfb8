"""The order of samples is a pure function, and slices partition each global batch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotrain.core.data import sampler
from isotrain.core.data.order.order import shuffled
from isotrain.core.data.order.permutation import permutation
from isotrain.core.data.order.samples import Columns, Samples
from isotrain.core.errors import DataError

lengths = st.integers(1, 200)
batches = st.integers(1, 64)
seeds = st.integers(0, 2**70)


def samples(length, **options):
    chosen = {"global_batch_size": 4, "seed": 1, "drop_remainder": False} | options
    return Samples(length, columns=Columns(None), **chosen)


GOLDEN = {(7, 0): [4, 2, 1, 8, 6, 7, 3, 9, 5, 0], (7, 1): [3, 5, 6, 8, 1, 9, 7, 0, 4, 2]}


@given(seed=seeds, epoch=st.integers(0, 1000), length=lengths)
def test_permutation_holds_each_sample_once_and_is_repeatable(seed, epoch, length):
    drawn = permutation(seed, (epoch,), length)
    assert drawn.dtype == np.int64
    assert sorted(drawn.tolist()) == list(range(length))
    assert drawn.tolist() == permutation(seed, (epoch,), length).tolist()


def test_permutation_values_are_fixed():
    """Other values would change every recorded loss curve, and break resuming old runs."""
    assert permutation(7, (0,), 10).tolist() == GOLDEN[7, 0]
    assert permutation(7, (1,), 10).tolist() == GOLDEN[7, 1]


def test_permutation_ignores_the_global_random_state():
    np.random.seed(1)
    first = permutation(3, (0,), 100)
    np.random.seed(2)
    assert first.tolist() == permutation(3, (0,), 100).tolist()


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (2**32, 0)])
def test_seed_and_epoch_each_change_the_order(other):
    first = permutation(0, (0,), 100).tolist()
    assert first != permutation(other[0], other[1:], 100).tolist()


def test_seed_and_epoch_are_not_interchangeable():
    orders = {
        tuple(permutation(seed, (epoch,), 50))
        for seed in (0, 1, 2, 2**32, 2**32 + 1)
        for epoch in range(3)
    }
    assert len(orders) == 15


def test_each_position_gets_each_sample_about_equally_often():
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[np.arange(8), permutation(0, (epoch,), 8)] += 1
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500)


def test_negative_seed_is_refused():
    with pytest.raises(DataError, match=r"seed: expected 0 or more, received -1"):
        permutation(-1, (0,), 6)


@given(length=lengths, size=batches)
def test_global_batches_cover_the_epoch_once(length, size):
    order = shuffled(samples(length, global_batch_size=size))
    parts = [order.epoch(2)(step) for step in range(order.steps_per_epoch)]
    assert np.concatenate(parts).tolist() == permutation(1, (2,), length).tolist()
    assert all(len(part) == size for part in parts[:-1])
    assert {len(part) for part in parts} == order.batch_sizes


@given(length=lengths, size=batches)
def test_dropping_the_remainder_leaves_full_global_batches(length, size):
    if length < size:
        with pytest.raises(DataError, match="not one global batch"):
            sampler.steps_per_epoch(length, size, drop_remainder=True)
        return
    steps = sampler.steps_per_epoch(length, size, drop_remainder=True)
    assert steps * size <= length < (steps + 1) * size


@given(size=st.integers(0, 200), replicas=st.integers(1, 40))
def test_slices_are_contiguous_and_differ_by_at_most_one(size, replicas):
    bounds = [sampler.slice_bounds(size, replicas, replica) for replica in range(replicas)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(size=st.integers(0, 200), replicas=st.integers(1, 8))
def test_replicas_have_whole_parts(size: int, replicas: int) -> None:
    bounds = [sampler.slice_bounds(size, replicas, replica, 8) for replica in range(replicas)]
    parts = [sampler.slice_bounds(size, 8, part) for part in range(8)]
    assert [bounds[0][0], *(stop for _, stop in bounds)][-1] == size
    assert {start for start, _ in bounds} <= {start for start, _ in parts}
    assert all(a[1] == b[0] for a, b in pairwise(bounds))


@given(size=st.integers(0, 200), counts=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_replicas_have_as_many_parts_as_they_are_dealt(size: int, counts: list[int]) -> None:
    parts, replicas = sum(counts), len(counts)
    first = 0
    for replica, count in enumerate(counts):
        start, stop = sampler.slice_bounds(size, replicas, replica, counts)
        assert start == sampler.slice_bounds(size, parts, first)[0]
        assert stop == sampler.slice_bounds(size, parts, first + count - 1)[1]
        first += count


def test_fewer_samples_than_replicas_leave_the_last_ones_empty():
    assert [sampler.slice_bounds(2, 4, r) for r in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_slice_sizes_are_those_of_the_bounds(size: int, replicas: int, micro_batches: int) -> None:
    sizes = set()
    for replica in range(replicas):
        start, stop = sampler.slice_bounds(size, replicas, replica)
        for index in range(micro_batches):
            first, end = sampler.slice_bounds(stop - start, micro_batches, index)
            sizes.add(end - first)
    assert sampler.slice_sizes(size, replicas, micro_batches) == sizes
