"""Every strategy on every backend: one run each, in which all of them have their turn."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from conformance import check_strategies, strategy_bench
from conformance.backends import BACKENDS

from isotrain.testing.launching import Run, attempt

CELLS = [*((backend, 2) for backend in BACKENDS), ("torch-ddp", 4), ("tf-mirrored", 4)]


pytestmark = pytest.mark.slow


@functools.cache
def checked(backend: str, replicas: int) -> Run:
    """What every process found; a run that fails does so once."""
    return attempt(check_strategies.run_checks, strategy_bench.spec(), backend, replicas)


def cells() -> list[Any]:
    return [
        pytest.param(backend, replicas, name, id=f"{backend}-{replicas}-{name}")
        for backend, replicas in CELLS
        for name in check_strategies.NAMES
    ]


@pytest.mark.parametrize(("backend", "replicas", "name"), cells())
def test_check(backend: str, replicas: int, name: str) -> None:
    """It holds in every process."""
    found = checked(backend, replicas)
    assert found.failure is None, found.failure
    told = [f"process {rank}: {failures[name]}" for rank, failures in enumerate(found.returned)]
    assert not any(failures[name] for failures in found.returned), "\n".join(told)
