"""Parity of the frameworks over everything that a spec can ask for, with one replica."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from conformance import spec_variety
from conformance.tolerances import EXACT, distance

from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

ONE, OTHER = "torch-ddp", "tf-multiworker"
ROUGH_BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3, "float16-clipped": 4e-3}
"""Half precisions round at other places in each framework; the bounds are a few of their roundings."""


@functools.cache
def results(backend: str) -> dict[str, dict[str, np.ndarray]]:
    """Results by spec and name, from one process that trains all specs."""
    (found,) = launched_in_turn(spec_variety.SPECS, spec_variety.train, backend, 1)
    return found


@pytest.mark.parametrize("name", spec_variety.SPECS)
def test_frameworks_agree(name: str) -> None:
    """Frameworks agree on losses, rates, weights, metrics and evaluation."""
    one, other = results(ONE)[name], results(OTHER)[name]
    bound = ROUGH_BOUNDS.get(name, EXACT)
    assert set(one) == set(other)
    apart = {key: distance(one[key], other[key]) for key in one if "accuracy" not in key}
    if name not in spec_variety.ROUGH:
        apart |= {key: distance(one[key], other[key]) for key in one if "accuracy" in key}
    far = {key: value for key, value in apart.items() if not value <= bound}
    assert not far, f"further apart than {bound}: {far}"


@pytest.mark.parametrize("name", spec_variety.SPECS)
def test_initial_weights_depend_on_the_seed_alone(name: str) -> None:
    """Initial weights do not depend on anything else in the spec."""
    starts = {k: v for k, v in results(ONE)[name].items() if k.startswith("start/")}
    reference = results(ONE)["sgd-nesterov"]
    equal = [np.allclose(value, reference[key], rtol=1e-6) for key, value in starts.items()]
    assert len(equal) == 4
    kernels = [e for e, key in zip(equal, starts, strict=True) if "kernel" in key]
    assert not any(kernels) if name == "other-seed" else all(equal)


@pytest.mark.parametrize("backend", [ONE, OTHER])
@pytest.mark.parametrize(
    "specs", [spec_variety.FLOAT64, spec_variety.ROUGH], ids=["float64", "rough"]
)
def test_every_choice_has_an_effect(backend: str, specs: dict[str, object]) -> None:
    """No two specs end with the same weights, so none of the choices is silently ignored."""
    found = results(backend)
    ends = {name: found[name]["weight/sequential/head/kernel"].tobytes() for name in specs}
    assert len(set(ends.values())) == len(ends), sorted(ends)
