"""Speeds up `import torch` by using two cores; to be imported before torch, in a fork server.

A fifth of the import's time goes into torch's shared library, which the system loads without holding the GIL.
sympy, which torch's compiler imports and which does not need torch, takes as long.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from importlib.util import find_spec
from pathlib import Path

_EXTENSIONS = ("cmath", "decimal", "unicodedata")
"""Extension modules that sympy imports; loaded first, as the system loads one library at a time."""


def _library() -> Path | None:
    """Path of torch's CPU library; None if it is not at the usual place."""
    torch_spec = find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return None
    path = Path(torch_spec.origin).parent / "lib" / "libtorch_cpu.so"
    return path if path.exists() else None


def _load(library: Path) -> None:
    """Loads a shared library; errors are left to torch's own import."""
    system = ctypes.CDLL(
        None
    )  # calling dlopen through ctypes releases the GIL; opening a CDLL does not
    system.dlopen(os.fsencode(library), os.RTLD_NOW)


def _import_in_parallel() -> None:
    for name in _EXTENSIONS:
        importlib.import_module(name)
    library = _library()
    loading = threading.Thread(target=_load, args=(library,)) if library else None
    if loading is not None:
        loading.start()
    importlib.import_module("sympy")
    if loading is not None:
        loading.join()  # a process that forks must have one thread


_import_in_parallel()
