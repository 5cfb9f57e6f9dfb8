"""Public modules without code of their own: a stub lists their names, which are imported on first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exports(
    module: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes `__getattr__`, `__dir__` and `__all__` of a public module.

    Args:
        module: Name of the module.
        file: Path of its file. The stub beside it (`.pyi`) is the one place that lists the names, for type
            checkers too. Its lines are `from HOME import NAME as PUBLIC_NAME`, or `PUBLIC_NAME = NAME` for a
            name that was imported under another one.
    """
    homes: dict[str, tuple[str, str]] = {}
    for statement in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for each in statement.names:
                homes[each.asname or each.name] = (statement.module, each.name)
        elif isinstance(statement, ast.Assign):
            (target,), value = statement.targets, statement.value
            assert isinstance(target, ast.Name)
            assert isinstance(value, ast.Name)
            homes[target.id] = homes[value.id]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = _imported(*homes[name], module)
        setattr(sys.modules[module], name, value)
        return value

    public = sorted(name for name in homes if not name.startswith("_"))
    return get, lambda: sorted({"__version__", *public} & {*homes}), public


def _imported(home: str, name: str, importer: str) -> Any:
    """Object that `from HOME import NAME` gives: an attribute of a module, or a module of a package."""
    module = importlib.import_module(home)
    if home != importer and hasattr(module, name):
        return getattr(module, name)
    return importlib.import_module(f"{home}.{name}")
