"""Statistics of a comparison's measurements: intervals, ratios and steady states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from isotrain.analysis.compare.measurement.statistics import (
    Bootstrap,
    mean,
    quantile,
    rate,
    steady_state_start,
)


def interval(values: np.ndarray, seed: int = 0) -> Any:
    """Interval of the mean of runs with one number each."""
    return Bootstrap.of_values(list(values), np.random.default_rng(seed)).estimate()


@pytest.mark.parametrize("runs", [3, 5, 20])
def test_intervals_cover_the_truth(runs: int) -> None:
    generator = np.random.default_rng(7)
    hits = 0
    for seed in range(200):
        found = interval(generator.normal(100, 5, runs), seed)
        hits += found.low <= 100 <= found.high
    assert 0.88 <= hits / 200 <= 0.995


def test_intervals_include_the_variation_between_runs() -> None:
    def width(between: float) -> float:
        generator = np.random.default_rng(1)
        runs = [generator.normal(100 + generator.normal(0, between), 1, (50, 1)) for _ in range(5)]
        found = Bootstrap.of_runs(runs, mean, np.random.default_rng(2)).estimate()
        return found.high - found.low

    assert width(between=10) > 5 * width(between=0)


def test_an_interval_of_equal_numbers_has_no_width() -> None:
    found = interval(np.full(4, 3.0))
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)
    zero = interval(np.zeros(3))
    assert (zero.low, zero.high) == (0.0, 0.0)


def test_intervals_are_reproducible_and_positive() -> None:
    wild = np.array([1.0, 50.0, 2000.0])
    assert interval(wild) == interval(wild)
    assert 0 < interval(wild).low < interval(wild).value < interval(wild).high


def test_statistics_of_blocks() -> None:
    blocks = np.array([[1.0, 2.0], [3.0, 2.0], [8.0, 4.0]])[:, None, :]
    assert mean(blocks) == [4.0]
    assert rate(blocks) == [1.5]
    assert quantile(0.5)(blocks) == [3.0]


def test_a_ratio_has_the_uncertainty_of_both() -> None:
    slow = Bootstrap.of_values([9, 10, 11], np.random.default_rng(0))
    sure = Bootstrap.of_values([20, 20, 20], np.random.default_rng(1))
    found = sure.relative_to(slow).estimate()
    assert found.value == pytest.approx(2)
    assert found.low < 20 / 10.5 < 20 / 9.5 < found.high
    assert sure.scaled(0.5).estimate().value == 10


def noisy(values: list[float], seed: int = 0) -> list[float]:
    noise = np.random.default_rng(seed).normal(1, 0.01, len(values))
    return [float(value * factor) for value, factor in zip(values, noise, strict=True)]


@pytest.mark.parametrize(
    ("times", "earliest", "latest"),
    [
        (noisy([1.0] * 30), 0, 5),
        (noisy([3.0] * 6 + [1.0] * 24), 6, 15),
        (noisy([1 + math.exp(-i / 2) for i in range(30)]), 4, 14),
        ([9.0, 5.0] + [1.0] * 20, 2, 3),
        (noisy([1.0] * 24 + [20.0] + [1.0] * 5), 0, 8),
    ],
    ids=["flat", "a level", "settling", "exact", "one slow block"],
)
def test_the_steady_state_is_found(times: list[float], earliest: int, latest: int) -> None:
    start = steady_state_start(times)
    assert start is not None
    assert earliest <= start <= latest


@pytest.mark.parametrize(
    "times",
    [
        noisy([1.0] * 7),
        noisy([1 + 0.05 * i for i in range(30)]),
        noisy([2 - 0.03 * i for i in range(30)]),
        noisy([1.0] * 20 + [2.0] * 10),
    ],
    ids=["too few", "slowing down", "speeding up", "a late change"],
)
def test_unsteady_times_have_no_steady_state(times: list[float]) -> None:
    assert steady_state_start(times) is None


def test_flat_noise_is_nearly_always_steady() -> None:
    found = [steady_state_start(noisy([1.0] * 40, seed)) for seed in range(200)]
    assert sum(start is None for start in found) < 20


def test_a_drift_within_the_noise_is_detected() -> None:
    drift = 1 - 0.15 * np.arange(60) / 60
    noise = [np.random.default_rng(seed).normal(1, 0.05, 60) for seed in range(100)]
    assert sum(steady_state_start(list(drift * one)) is not None for one in noise) < 40
