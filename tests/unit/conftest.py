"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from isotrain.core.plugins.manager import PluginManager


@pytest.fixture
def host() -> PluginManager:
    """A plugin manager with the built-in plugins alone."""
    return PluginManager(entry_points=False)
