"""Every conformance check on every backend, with 2 and 3 replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance import checks
from conformance.backends import BACKENDS, EVERYDAY, REPLICAS, every_backend, param

from isotrain.core.registry import plugin_host

Checked = Callable[[str, int], list[dict[str, Any]]]


def applicable() -> list[object]:
    """Each backend and number of replicas with each check that its declared capabilities call for."""
    return [
        param(backend, replicas, name, slow=(backend, replicas) not in EVERYDAY)
        for backend in BACKENDS
        for replicas in REPLICAS
        for name in checks.NAMES
        if checks.NEEDS[name] <= plugin_host().backend(backend).supported
    ]


@pytest.mark.parametrize(("backend", "replicas", "name"), applicable())
def test_check(checked: Checked, backend: str, replicas: int, name: str) -> None:
    """It holds in every process."""
    failures = {
        rank: returned["failures"].get(name, "the check was not made")
        for rank, returned in enumerate(checked(backend, replicas))
    }
    told = [f"process {rank}: {text}" for rank, text in failures.items() if text]
    assert not told, "\n".join(told)


@pytest.mark.parametrize(("backend", "replicas"), every_backend())
def test_no_other_checks_are_made(checked: Checked, backend: str, replicas: int) -> None:
    """What a backend does not support it also declares, with a reason."""
    adapter = plugin_host().backend(backend)
    made = set(checked(backend, replicas)[0]["failures"])
    left_out = {need for name in set(checks.NAMES) - made for need in checks.NEEDS[name]}
    missing = left_out - adapter.supported
    assert missing <= set(adapter.unsupported)
    assert all(adapter.unsupported[capability] for capability in missing)


def _start_pairs() -> list[object]:
    cells = [(backend, replicas) for replicas in REPLICAS for backend in BACKENDS]
    return [param(cells[0], cell, slow=not {cells[0], cell} <= EVERYDAY) for cell in cells[1:]]


@pytest.mark.parametrize(("one", "other"), _start_pairs())
def test_initial_weights_are_a_function_of_model_and_seed(
    checked: Checked, one: tuple[str, int], other: tuple[str, int]
) -> None:
    """Equal to the bit on all backends and replicas: each is compared with the first."""
    here, there = checked(*one)[0]["start"], checked(*other)[0]["start"]
    names = [name for name in here if "/kernel" in name or "/embeddings" in name]
    assert len(names) == 4, names
    for name in names:
        assert np.array_equal(here[name], there[name]), name
    drawn = {here[name].ravel()[:3].tobytes() for name in names}
    assert len(drawn) == len(names), "layers start from the same draws"
