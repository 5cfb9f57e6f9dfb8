"""Availability of the packages that loggers need."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from isotrain.core.contracts.backend.capabilities import Availability


def package_availability(module: str) -> Availability:
    """Whether a package is installed, with its version; imports nothing."""
    if importlib.util.find_spec(module) is None:
        hint = f"install it: pip install 'isotrain[{module}]'"
        return Availability(False, None, f"the package {module!r} is not installed", hint)
    distributions = metadata.packages_distributions().get(module, [])
    return Availability(True, metadata.version(distributions[0]) if distributions else None)
