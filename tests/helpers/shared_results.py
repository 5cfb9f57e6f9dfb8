"""Expensive results that several test files need: computed once, and kept on disk for all test processes."""

from __future__ import annotations

import fcntl
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isotrain.core.launching.run_directory.return_values import load_value, save_value

FOLDER = "ISOTRAIN_TESTS_SHARED"
"""The variable that names the folder of a test session; `conftest.py` sets it."""


def once(name: str, make: Callable[[], Any]) -> Any:
    """Result of `make` in the first test process that calls; a failure is kept too.

    Args:
        name: Name of the result, unique in the test session.
        make: Returns numbers, text, NumPy arrays, and lists or dicts of these.
    """
    found = _kept(name, make)
    assert "failure" not in found, found["failure"]
    return found["value"]


_known: dict[str, dict[str, Any]] = {}


def _kept(name: str, make: Callable[[], Any]) -> dict[str, Any]:
    if name not in _known:
        folder = Path(os.environ[FOLDER])
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / f"{name}.json").exists():
                save_value(_attempted(make), folder, name)
            _known[name] = load_value(folder, name)
    return _known[name]


def _attempted(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": make()}
    except Exception:
        return {"failure": traceback.format_exc()}
