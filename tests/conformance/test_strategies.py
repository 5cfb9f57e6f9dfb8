"""Every strategy on every backend: one run each, in which all of them have their turn."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from conformance import check_strategies, strategy_check_context
from conformance.backends import BACKENDS, param

from isotrain.testing.launching import Run, try_run

COUNTING = {*check_strategies.ON_THE_WIRE, "exchanges_send_what_they_say"}
NEUTRAL = tuple(name for name in check_strategies.NAMES if name not in COUNTING)
CELLS = {
    ("reference", 4): NEUTRAL,
    **dict.fromkeys([(backend, 2) for backend in BACKENDS], check_strategies.OF_BACKENDS),
    ("torch-ddp", 2): (*NEUTRAL, "native_compression"),
    ("torch-ddp", 4): check_strategies.ON_THE_WIRE,
}
"""What strategies do is asked in NumPy and of one framework; of the others, what is theirs.

More than two replicas need a framework only for the bytes that are sent.
"""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reference")]


@functools.cache
def checked(backend: str, replicas: int) -> Run:
    """What every process found; a run that fails does so once."""
    work = functools.partial(check_strategies.run_checks, names=CELLS[backend, replicas])
    return try_run(work, strategy_check_context.spec(backend), backend, replicas)


def cells() -> list[Any]:
    return [
        param(backend, replicas, name)
        for (backend, replicas), names in CELLS.items()
        for name in names
    ]


@pytest.mark.parametrize(("backend", "replicas", "name"), cells())
def test_strategy_check(backend: str, replicas: int, name: str) -> None:
    """The check holds in every process."""
    found = checked(backend, replicas)
    assert found.failure is None, found.failure
    told = [f"process {rank}: {failures[name]}" for rank, failures in enumerate(found.returned)]
    assert not any(failures[name] for failures in found.returned), "\n".join(told)
