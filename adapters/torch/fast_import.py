"""Begins to import torch on two cores; to be imported before it, in a process that will fork.

A fifth of the time goes into its shared library, which the system loads without Python. As long takes sympy,
which torch's compiler imports and which needs nothing of torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from importlib.util import find_spec
from pathlib import Path

_EXTENSIONS = ("cmath", "decimal", "unicodedata")
"""What sympy imports and the system loads too, one after the other: they would wait for the library."""


def _library() -> Path | None:
    """What torch computes with on CPUs; None where it lies elsewhere."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
    return path if path.exists() else None


def _load(library: Path) -> None:
    """Loads a shared library; where it cannot be, torch says why when it does so itself."""
    system = ctypes.CDLL(None)  # functions of a library let Python go on; to open one does not
    system.dlopen(os.fsencode(library), os.RTLD_NOW)


def _begin() -> None:
    for name in _EXTENSIONS:
        importlib.import_module(name)
    library = _library()
    loading = threading.Thread(target=_load, args=(library,)) if library else None
    if loading is not None:
        loading.start()
    importlib.import_module("sympy")
    if loading is not None:
        loading.join()  # a process that forks has one thread


_begin()
