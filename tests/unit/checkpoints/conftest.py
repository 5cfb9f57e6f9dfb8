"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest
from unit.checkpoints.recording_os import WatchedOs

from isotrain.core.checkpoints import local_storage


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> WatchedOs:
    """Records the system calls that change local checkpoint folders."""
    watched = WatchedOs()
    monkeypatch.setattr(local_storage, "os", watched)
    return watched
