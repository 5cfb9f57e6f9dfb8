"""The version of isotrain, and those of the packages that a run uses."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable
from importlib import metadata

_ALWAYS_LISTED = ("isotrain", "numpy")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, isotrain, NumPy and a backend's packages.

    Args:
        packages: Distribution names of the backend's packages; those that are not installed are left out.
    """
    installed = installed_versions((*_ALWAYS_LISTED, *packages))
    return {"python": platform.python_version(), **installed}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed, by name."""
    installed = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


VERSION = "0.1.0"
