"""Fixtures of the conformance suite: one started run serves many tests."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

import isotrain
from conformance import checks, probe

Checked = list[dict[str, Any]]


@functools.cache
def checked_run(backend: str, replicas: int) -> Checked | Exception:
    """What every process returned from all checks; or why the run failed, so that it fails once."""
    try:
        return isotrain.launch(
            checks.run_checks,
            probe.spec(),
            backend=backend,
            replicas=replicas,
            run_directory=tempfile.mkdtemp(prefix="isotrain-conformance-"),
            on_event=_quiet,
        )
    except Exception as error:
        return error


def _quiet(event: Any) -> None:
    """Shows nothing of a run."""


@pytest.fixture(scope="session")
def checked() -> Callable[[str, int], Checked]:
    """Gives what the checks found for (backend, replicas); the run is made once."""

    def get(backend: str, replicas: int) -> Checked:
        found = checked_run(backend, replicas)
        if isinstance(found, Exception):
            raise found
        return found

    return get
