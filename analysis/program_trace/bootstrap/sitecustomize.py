"""Hooks a program that `isotrain trace` runs: Python imports this file before the program.

Every process of the program inherits `PYTHONPATH`, whatever starts it. Frameworks are hooked once the program
has imported them, and the `sitecustomize` that this one hides runs too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "ISOTRAIN_PROGRAM_TRACE"
"""Variable with the folder of the trace, the number of steps, and the hooks by framework."""


class Finder:
    """Finds the modules of frameworks as Python does, and calls their hooks after the import."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Takes what the variable says."""
        self._told = told
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The specification of a framework that is not hooked yet; else None."""
        if self._searching or name not in self._told["hooks"]:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            hook = self._told["hooks"].pop(name, None)  # others may have looked for it before
            if hook is not None:
                self._hook(hook)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _hook(self, hook: str) -> None:
        from isotrain.analysis.program_trace.recorder import Recorder

        module_name, _, function = hook.partition(":")
        recorder = Recorder(Path(self._told["folder"]), self._told["steps"])
        getattr(importlib.import_module(module_name), function)(recorder)


def run_hidden() -> None:
    """Runs the `sitecustomize` that Python would import without this file."""
    here = Path(__file__).parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if VARIABLE in os.environ:
        sys.meta_path.insert(0, Finder(json.loads(os.environ[VARIABLE])))
    run_hidden()
