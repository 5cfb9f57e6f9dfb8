"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.leftover_processes import no_leftover_processes
from integration.scheduler_launchers import Far, TwoHere, WrapperLauncher

import isotrain
from isotrain.core.plugins import selection


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """Checks that a test leaves no process behind."""
    with no_leftover_processes():
        yield


@pytest.fixture
def wrapper() -> Iterator[None]:
    """Registers the launchers `wrapper`, `far` and `two-here`."""
    before = selection.current()
    isotrain.register(WrapperLauncher)
    isotrain.register(Far)
    isotrain.register(TwoHere)
    yield
    selection.set_current(before)
