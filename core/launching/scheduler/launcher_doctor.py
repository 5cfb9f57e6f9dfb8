"""Examines whether a launcher could start runs from this process, and what is missing; starts nothing."""

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
    """Examines a launcher in this process's environment, as plain values.

    Args:
        host: Plugin manager with the launchers.
        name: Name of the launcher.
        options: Options of the launcher.

    Returns:
        Fields of `launcher_support.launchers`; `options` with their defaults; `allocation` with the given
        options, or `no_allocation` with the reason; `cluster_info` of this process, or `no_cluster_info` with
        the reason; and `tls`, the TLS settings of a run's processes.

    Raises:
        IsotrainError: No launcher has that name, or it rejects the options.
    """
    launcher = host.launcher(name, options)
    (listed,) = (each for each in launcher_support.launchers(host) if each["name"] == name)
    allocation, no_allocation = _allocation(launcher)
    cluster_info, no_cluster_info = _cluster_info(host)
    return {
        **listed,
        "options": _options(type(launcher)),
        "allocation": allocation,
        "no_allocation": no_allocation,
        "cluster_info": cluster_info,
        "no_cluster_info": no_cluster_info,
        "tls": EncryptionOffer.from_folder(os.environ.get(TLS_VARIABLE, "")).facts(),
    }


def _options(kind: type[Launcher]) -> dict[str, Any]:
    if kind.__init__ is object.__init__:
        return {}
    parameters = list(inspect.signature(kind).parameters.values())
    return {each.name: None if each.default is each.empty else each.default for each in parameters}


def _allocation(launcher: Launcher) -> tuple[list[dict[str, Any]] | None, str | None]:
    if not isinstance(launcher, SchedulerLauncher):
        return None, "it starts processes on this machine only"
    try:
        return [asdict(slots) for slots in launcher.allocation().host_slots], None
    except IsotrainError as error:
        return None, str(error)


def _cluster_info(host: PluginManager) -> tuple[dict[str, Any] | None, str | None]:
    try:
        info = cluster_info_of(os.environ, host)
    except IsotrainError as error:
        return None, str(error)
    if info is None:
        return None, "no launcher or scheduler started this process"
    return asdict(info), None
