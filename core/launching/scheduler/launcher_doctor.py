"""Finding out whether a launcher could start runs from here, and what is missing; starts nothing."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from isotrain.core.contracts.launcher import Launcher
from isotrain.core.errors import IsotrainError
from isotrain.core.launching.scheduler.scheduler_launcher import SchedulerLauncher
from isotrain.core.planning import launcher_support
from isotrain.core.planning.cluster_environment import cluster_info_of
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.transport.encryption import TLS_VARIABLE, EncryptionOffer


def examine_launcher(host: PluginManager, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to say of a launcher here, as plain values.

    Args:
        host: Knows the launchers.
        name: Of this one.
        options: Of this one.

    Returns:
        As `launchable.launchers` describes it; besides its `options` with their defaults, the `allocation`
        that it has here with those given, or why it has none, the `place` of this process, and the `tls` that
        a run's processes would have here.

    Raises:
        IsotrainError: There is no launcher of that name, or it refuses the options.
    """
    launcher = host.launcher(name, options)
    (described,) = (each for each in launcher_support.launchers(host) if each["name"] == name)
    allocation, why_none = _allocation(launcher)
    place, unclear = _place(host)
    return {
        **described,
        "options": _options(type(launcher)),
        "allocation": allocation,
        "no_allocation": why_none,
        "cluster_info": place,
        "no_cluster_info": unclear,
        "tls": EncryptionOffer.from_folder(os.environ.get(TLS_VARIABLE, "")).facts(),
    }


def _options(kind: type[Launcher]) -> dict[str, Any]:
    if kind.__init__ is object.__init__:
        return {}
    parameters = list(inspect.signature(kind).parameters.values())
    return {each.name: None if each.default is each.empty else each.default for each in parameters}


def _allocation(launcher: Launcher) -> tuple[list[dict[str, Any]] | None, str | None]:
    if not isinstance(launcher, SchedulerLauncher):
        return None, "it starts processes on this machine alone"
    try:
        return [asdict(share) for share in launcher.allocation().host_slots], None
    except IsotrainError as error:
        return None, str(error)


def _place(host: PluginManager) -> tuple[dict[str, Any] | None, str | None]:
    try:
        found = cluster_info_of(os.environ, host)
    except IsotrainError as error:
        return None, str(error)
    return (None, "no engine started this process") if found is None else (asdict(found), None)
