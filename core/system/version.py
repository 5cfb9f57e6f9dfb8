"""Which isotrain this is."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

_OWN = ("isotrain", "numpy")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of the packages that take part in a run.

    Args:
        packages: Those of its backend, by the names of their distributions; who is not installed is left
            out.
    """
    found = {"python": platform.python_version()}
    for package in (*_OWN, *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


VERSION = "0.1.0"
