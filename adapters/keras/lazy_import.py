"""Importing this module before Keras makes two of Keras' subpackages lazy; nothing else changes.

`keras.wrappers` imports scikit-learn and `keras.visualization` matplotlib where these are installed, which
takes longer than the rest of Keras, in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from threading import RLock
from types import ModuleType
from typing import Any

DEFERRED = frozenset(
    f"{package}.{part}"
    for package in ("keras", "keras._tf_keras.keras", "keras.src")
    for part in ("wrappers", "visualization")
)

_ABOUT = frozenset({"__name__", "__file__", "__path__", "__package__", "__loader__", "__class__"})
"""Attributes that a module has before it is executed."""


class _UntilUsed(LazyLoader):
    """Loader that executes a module on the first read of an attribute that is not in `_ABOUT`.

    `inspect` and TensorFlow's AutoGraph read these attributes of all loaded modules to find a file's module;
    `torch.package` makes `inspect` test whether each module is a class.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        lazy, lock = type(module), RLock()

        def read(unused: ModuleType, name: str) -> Any:
            if name in _ABOUT:
                return object.__getattribute__(unused, name)
            with lock:
                if type(unused) is Unused:
                    unused.__class__ = lazy
            return getattr(unused, name)

        Unused = type("Unused", (lazy,), {"__getattribute__": read})
        module.__class__ = Unused


class _Deferring(MetaPathFinder):
    """Finder that gives the deferred subpackages of Keras a lazy loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _UntilUsed(spec.loader)
        return spec


if "keras" not in sys.modules:
    sys.meta_path.insert(0, _Deferring())
