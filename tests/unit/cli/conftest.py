"""Fixtures of the tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.cli.small_project import MODULE, SPEC


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a spec and the module that it names."""
    (tmp_path / "small.py").write_text(MODULE)
    (tmp_path / "small.json").write_text(json.dumps(SPEC))
    return tmp_path
