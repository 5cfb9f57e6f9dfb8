"""Whether the package that a logger writes with is installed."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from isotrain.core.contracts.capabilities import Availability


def package_availability(module: str) -> Availability:
    """Looks for a package, importing nothing.

    Args:
        module: Its import name, which is also the name of isotrain's extra that installs it.
    """
    if importlib.util.find_spec(module) is None:
        hint = f"install it: pip install 'isotrain[{module}]'"
        return Availability(False, None, f"the package {module!r} is not installed", hint)
    owners = metadata.packages_distributions().get(module, [])
    return Availability(True, metadata.version(owners[0]) if owners else None)
