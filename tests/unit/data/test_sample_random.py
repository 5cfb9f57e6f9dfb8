"""Draws depend on (seed, epoch, sample, number of the draw) alone, and look random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotrain.core.data.sample_rng import GOLDEN, SampleRandom, mixed
from isotrain.core.errors import DataError


def draws(seed: int, epoch: int, indices: np.ndarray) -> list[np.ndarray]:
    random = SampleRandom(seed, epoch, indices)
    return [
        random.uniform(-1.0, 1.0),
        random.normal(2.0, 3.0, (2, 3)),
        random.integers(-5, 6, (4,)),
        random.bernoulli(0.3),
        random.uniform(shape=(1,)),
    ]


@given(
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 10_000),
    indices=st.lists(st.integers(0, 2**40), min_size=2, max_size=40),
    data=st.data(),
)
def test_draws_are_bit_equal_however_the_batch_is_split(seed, epoch, indices, data):
    cut = data.draw(st.integers(1, len(indices) - 1))
    rows = np.array(indices, dtype=np.int64)
    whole = draws(seed, epoch, rows)
    parts = zip(draws(seed, epoch, rows[:cut]), draws(seed, epoch, rows[cut:]), strict=True)
    for together, split in zip(whole, parts, strict=True):
        assert together.tobytes() == np.concatenate(split).tobytes()


def test_the_finaliser_gives_the_published_generators_numbers():
    """SplitMix64 started at 0 is the finaliser over multiples of its step."""
    steps = np.array([GOLDEN, 2 * GOLDEN % 2**64], dtype=np.uint64)
    assert mixed(steps).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_shapes_and_dtypes():
    assert [(x.shape, x.dtype.name) for x in draws(0, 0, np.arange(5))] == [
        ((5,), "float64"),
        ((5, 2, 3), "float64"),
        ((5, 4), "int64"),
        ((5,), "bool"),
        ((5, 1), "float64"),
    ]
    assert len(SampleRandom(0, 0, np.arange(5))) == 5


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_seed_epoch_and_sample_each_change_the_draws(other):
    seed, epoch, index = other
    first = SampleRandom(0, 0, np.array([0])).uniform(shape=(64,))
    second = SampleRandom(seed, epoch, np.array([index])).uniform(shape=(64,))
    assert not np.any(first == second)
    assert abs(np.corrcoef(first[0], second[0])[0, 1]) < 0.5


def test_no_draw_repeats_a_number_of_an_earlier_one():
    together = SampleRandom(5, 3, np.arange(4)).uniform(shape=(6,))
    random = SampleRandom(5, 3, np.arange(4))
    one_by_one = [
        random.uniform(shape=(3,)),
        random.uniform(shape=(2,)),
        random.uniform(shape=(1,)),
    ]
    assert together.tobytes() == np.concatenate(one_by_one, axis=1).tobytes()


def test_seed_and_epoch_are_not_interchangeable():
    pairs = [(0, 2), (1, 1), (2, 0)]
    first = {SampleRandom(seed, epoch, np.array([0])).uniform().item() for seed, epoch in pairs}
    assert len(first) == len(pairs)


def test_draws_are_fixed():
    """A resumed run continues with the numbers of an earlier version."""
    random = SampleRandom(7, 2, np.array([0, 5]))
    assert random.uniform().tolist() == [0.6166775677757208, 0.8024110451383614]
    assert random.integers(0, 1000, (2,)).tolist() == [[435, 901], [305, 196]]
    random, uniform = (SampleRandom(7, 2, np.array([0, 5])) for _ in range(2))
    radius, angle = np.sqrt(-2 * np.log1p(-uniform.uniform())), 2 * np.pi * uniform.uniform()
    assert random.normal(1.0, 2.0).tolist() == (1.0 + 2.0 * (radius * np.cos(angle))).tolist()


def test_uniform_fills_its_bins_equally():
    values = SampleRandom(3, 1, np.arange(20_000)).uniform(shape=(10,))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.bincount((values.ravel() * 256).astype(int), minlength=256)
    expected = values.size / 256
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert 150 < chi2 < 390  # 255 degrees of freedom: 22.6 standard deviation


def test_neighbouring_samples_draws_and_epochs_are_uncorrelated():
    values = SampleRandom(3, 1, np.arange(20_000)).uniform(shape=(4,)) - 0.5
    later = SampleRandom(3, 2, np.arange(20_000)).uniform(shape=(4,)) - 0.5
    pairs = [(values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values, later)]
    for left, right in pairs:
        correlation = np.corrcoef(left.ravel(), right.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(left.size)


def bits(indices: np.ndarray) -> np.ndarray:
    """The 53 bits of each sample's first uniform draw, uint64 [batch]."""
    return (SampleRandom(0, 0, indices).uniform() * 2.0**53).astype(np.uint64)


def test_one_flipped_bit_of_the_index_flips_half_of_the_output():
    base = np.arange(2000, dtype=np.int64)
    first = bits(base)
    for bit in range(40):
        flipped = (
            np.unpackbits((first ^ bits(base ^ (1 << bit))).view(np.uint8)).sum() / first.size / 53
        )
        assert abs(flipped - 0.5) < 0.01, bit


def test_normal_has_the_moments_of_a_normal():
    values = SampleRandom(1, 0, np.arange(100_000)).normal(2.0, 3.0)
    z = (values - 2.0) / 3.0
    assert abs(z.mean()) < 0.02
    assert abs(z.std() - 1) < 0.02
    assert abs((z**3).mean()) < 0.05
    assert abs((z**4).mean() - 3) < 0.15
    assert abs((np.abs(z) < 1.96).mean() - 0.95) < 0.005


def test_integers_cover_the_range_equally():
    values = SampleRandom(1, 0, np.arange(70_000)).integers(-3, 4)
    counts = np.bincount(values + 3, minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - 10_000).max() < 500


def test_bernoulli_has_its_probability():
    random = SampleRandom(1, 0, np.arange(100_000))
    assert abs(random.bernoulli(0.3).mean() - 0.3) < 0.01
    assert not random.bernoulli(0.0).any()
    assert random.bernoulli(1.0).all()


def test_wrong_ranges_are_refused():
    random = SampleRandom(0, 0, np.arange(2))
    with pytest.raises(DataError, match="low=3, high=3"):
        random.integers(3, 3)
    with pytest.raises(DataError, match="at most"):
        random.integers(0, 2**32 + 1)
    with pytest.raises(DataError, match=r"p=1\.5"):
        random.bernoulli(1.5)
