"""Every strategy on every backend: one run each, in which all of them have their turn."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from conformance import check_strategies, strategy_bench
from conformance.backends import BACKENDS, param

from isotrain.testing.launching import Run, attempt

NEUTRAL = tuple(name for name in check_strategies.NAMES if name not in check_strategies.ON_THE_WIRE)
AT_LENGTH = ("reference", "torch-ddp", "tf-multiworker")
"""Where strategies are trained until they converge: in NumPy and once on each framework."""


def names(backend: str) -> tuple[str, ...]:
    """The checks on a backend."""
    return tuple(
        name for name in check_strategies.NAMES if name != "converge" or backend in AT_LENGTH
    )


CELLS = {
    ("reference", 4): NEUTRAL,
    **{(backend, 2): names(backend) for backend in BACKENDS},
    ("torch-ddp", 4): check_strategies.ON_THE_WIRE,
}
"""What strategies do with more than two replicas needs no framework, but for what it costs on the wire."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reference")]


@functools.cache
def checked(backend: str, replicas: int) -> Run:
    """What every process found; a run that fails does so once."""
    work = functools.partial(check_strategies.run_checks, names=CELLS[backend, replicas])
    return attempt(work, strategy_bench.spec(backend), backend, replicas)


def cells() -> list[Any]:
    return [
        param(backend, replicas, name)
        for (backend, replicas), names in CELLS.items()
        for name in names
    ]


@pytest.mark.parametrize(("backend", "replicas", "name"), cells())
def test_check(backend: str, replicas: int, name: str) -> None:
    """It holds in every process."""
    found = checked(backend, replicas)
    assert found.failure is None, found.failure
    told = [f"process {rank}: {failures[name]}" for rank, failures in enumerate(found.returned)]
    assert not any(failures[name] for failures in found.returned), "\n".join(told)
