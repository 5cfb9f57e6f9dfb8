"""Fixtures of the conformance suite: one started run serves many tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from conformance import checks, probe
from conformance.runs import launch_quietly

Checked = list[dict[str, Any]]


@functools.cache
def checked_run(backend: str, replicas: int) -> Checked | Exception:
    """What every process returned from all checks; or why the run failed, so that it fails once."""
    try:
        return launch_quietly(checks.run_checks, probe.spec(), backend, replicas)
    except Exception as error:
        return error


@pytest.fixture(scope="session")
def checked() -> Callable[[str, int], Checked]:
    """Gives what the checks found for (backend, replicas); the run is made once."""

    def get(backend: str, replicas: int) -> Checked:
        found = checked_run(backend, replicas)
        if isinstance(found, Exception):
            raise found
        return found

    return get
