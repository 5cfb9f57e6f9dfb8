"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.leftover_processes import no_leftover_processes
from integration.scheduler_launchers import Engine, Far

import isotrain
from isotrain.core.plugins import selection


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """Checks that a test leaves no process behind."""
    with no_leftover_processes():
        yield


@pytest.fixture
def engine() -> Iterator[None]:
    """Registers the launchers `engine` and `far`."""
    before = selection.current()
    isotrain.register(Engine)
    isotrain.register(Far)
    yield
    selection.set_current(before)
