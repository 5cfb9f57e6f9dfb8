"""Marks conformance checks that are not in the everyday tier."""

from __future__ import annotations

import pytest

from isotrain.testing import backend

LONG = {check.name for check in (backend.RESUMES, *backend.CRASH_CHECKS)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the checks that start runs of their own as slow."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("check") in LONG:
            item.add_marker(pytest.mark.slow)
