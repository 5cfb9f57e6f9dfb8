"""How far apart two runs are, and how far they may be."""

from __future__ import annotations

from typing import Any

import numpy as np

EXACT = 1e-12
"""Relative distance of two float64 runs that rounding explains."""
NEAR = 1e-5
"""The same for float32 runs of a few steps."""


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
