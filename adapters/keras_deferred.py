"""Importing this before Keras defers two of its parts until somebody uses them; nothing else changes.

`keras.wrappers` imports scikit-learn and `keras.visualization` matplotlib where these are installed, which
takes longer than the rest of Keras, in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

DEFERRED = frozenset(
    f"{package}.{part}"
    for package in ("keras", "keras._tf_keras.keras", "keras.src")
    for part in ("wrappers", "visualization")
)


class _Deferring(MetaPathFinder):
    """Finds these parts of Keras; they are executed when one of their attributes is asked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


if "keras" not in sys.modules:
    sys.meta_path.insert(0, _Deferring())
