"""Public modules without code of their own: their names stand in a stub, and are imported on first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def of(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Gives what such a module consists of.

    Args:
        module: Its name.
        file: Its file; beside it is a stub (`.pyi`) of lines `from HOME import NAME as PUBLIC_NAME`, the one
            place where its names are listed, for type checkers too.

    Returns:
        Its `__getattr__`, `__dir__` and `__all__`.
    """
    stub = Path(file).with_suffix(".pyi")
    imports = ast.parse(stub.read_text(encoding="utf-8")).body
    homes = {
        each.asname or each.name: (found.module, each.name)
        for found in imports
        if isinstance(found, ast.ImportFrom) and found.module
        for each in found.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = _imported(*homes[name], module)
        setattr(sys.modules[module], name, value)
        return value

    public = sorted(name for name in homes if not name.startswith("_"))
    return get, lambda: sorted({"__version__", *public} & {*homes}), public


def _imported(home: str, name: str, asker: str) -> Any:
    """What `from HOME import NAME` gives: something that a module has, or a module of a package."""
    found = importlib.import_module(home)
    if home != asker and hasattr(found, name):
        return getattr(found, name)
    return importlib.import_module(f"{home}.{name}")
