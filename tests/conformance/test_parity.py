"""Promises 3 and 4: any two backends start from the same weights and go the same way."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from conformance import runs
from conformance.backends import BACKENDS, param

EXACT = 1e-12
"""Relative distance of two float64 runs that rounding explains."""
NEAR = 1e-5
"""The same for float32 runs of a few steps."""
CASES = ("sgd-float64", "adam-float64", "adamw-float64")
QUICK = ("sgd-float64", "torch-ddp", "tf-mirrored")


def pairs() -> list[object]:
    """Every case with every two backends."""
    return [
        param(case, one, other, slow=(case, one, other) != QUICK)
        for case in CASES
        for one, other in itertools.combinations(BACKENDS, 2)
    ]


def distance(one: Any, other: Any) -> float:
    """The largest difference relative to the largest number."""
    one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
    assert one.shape == other.shape, f"{one.shape} against {other.shape}"
    scale = max(float(np.abs(other).max(initial=0.0)), np.finfo("float64").tiny)
    return float(np.abs(one - other).max(initial=0.0)) / scale


def assert_equal_runs(one: dict[str, Any], other: dict[str, Any], bound: float) -> None:
    """Losses and final weights of two runs are within `bound`."""
    apart = {"loss": max(map(distance, one["loss"], other["loss"]))}
    assert set(one["weights"]) == set(other["weights"])
    for name, value in one["weights"].items():
        apart[name] = distance(value, other["weights"][name])
    far = {name: value for name, value in apart.items() if not value <= bound}
    assert not far, f"further apart than {bound}: {far}"


@pytest.mark.parametrize(("case", "one", "other"), pairs())
def test_two_backends_agree(case: str, one: str, other: str) -> None:
    """In float64, to the rounding of sums."""
    assert_equal_runs(runs.trained(one, 2, case), runs.trained(other, 2, case), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_agree_with_one(case: str) -> None:
    """In float64; the other backends follow by their agreement with this one."""
    alone, two = runs.trained("torch-ddp", 1, case), runs.trained("torch-ddp", 2, case)
    assert_equal_runs(two, alone, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_gets_somewhere(case: str) -> None:
    """The comparison means something: the loss falls, and every weight moves."""
    alone = runs.trained("torch-ddp", 1, case)
    assert alone["loss"][-2] < alone["loss"][0]
    still = [n for n, v in alone["weights"].items() if np.array_equal(v, alone["start"][n])]
    assert not still


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), itertools.combinations(BACKENDS, 2))
def test_two_backends_start_alike(one: str, other: str) -> None:
    """From initial weights that are equal to the bit."""
    here, there = (runs.trained(name, 2, "sgd-float64")["start"] for name in (one, other))
    assert set(here) == set(there)
    for name, value in here.items():
        assert np.array_equal(value, there[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), itertools.combinations(BACKENDS, 2))
def test_two_backends_are_near_in_float32(one: str, other: str) -> None:
    """A few steps of float32 stay together."""
    assert_equal_runs(
        runs.trained(one, 2, "adam-float32"), runs.trained(other, 2, "adam-float32"), NEAR
    )
