"""The version of isotrain, and those of the packages that a run uses."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

_ALWAYS_LISTED = ("isotrain", "numpy")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, isotrain, NumPy and a backend's packages.

    Args:
        packages: Distribution names of the backend's packages; those that are not installed are left out.
    """
    installed = {"python": platform.python_version()}
    for package in (*_ALWAYS_LISTED, *packages):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


VERSION = "0.1.0"
