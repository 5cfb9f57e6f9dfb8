"""Promises 3 and 4: any two backends start from the same weights and go the same way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conformance import trained_cases
from conformance.backends import BACKENDS
from conformance.tolerances import EXACT, NEAR, assert_equal_runs

PAIRS = list(itertools.combinations(BACKENDS, 2))

pytestmark = [pytest.mark.slow, pytest.mark.kernels]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_backends_agree(one: str, other: str) -> None:
    """In float64 any two backends agree to the rounding of sums."""
    here, there = (trained_cases.trained(name, 2, trained_cases.FLOAT64) for name in (one, other))
    assert_equal_runs(here, there, EXACT)


def test_two_replicas_agree_with_one() -> None:
    """In float64 two replicas agree with one; other backends follow by their agreement with this one."""
    alone, two = (
        trained_cases.trained("torch-ddp", replicas, trained_cases.FLOAT64) for replicas in (1, 2)
    )
    assert_equal_runs(two, alone, EXACT)


def test_training_changes_loss_and_weights() -> None:
    """The comparison means something: the loss falls, and every weight moves."""
    alone = trained_cases.trained("torch-ddp", 1, trained_cases.FLOAT64)
    assert alone["loss"][-2] < alone["loss"][0]
    still = [n for n, v in alone["weights"].items() if np.array_equal(v, alone["start"][n])]
    assert not still


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_backends_start_alike(one: str, other: str) -> None:
    """Initial weights are equal to the bit."""
    here, there = (
        trained_cases.trained(name, 2, trained_cases.FLOAT64)["start"] for name in (one, other)
    )
    assert set(here) == set(there)
    for name, value in here.items():
        assert np.array_equal(value, there[name]), name


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_backends_are_near_in_float32(one: str, other: str) -> None:
    """A few steps of float32 stay together, with and without samples."""
    here, there = (trained_cases.trained(name, 2, trained_cases.SMALL) for name in (one, other))
    assert_equal_runs(here, there, NEAR)


def test_two_frameworks_are_near_in_float32() -> None:
    """A few steps of float32 stay together for every kind of layer."""
    here, there = (
        trained_cases.trained(name, 2, trained_cases.FLOAT32)
        for name in ("torch-ddp", "tf-mirrored")
    )
    assert_equal_runs(here, there, NEAR)
