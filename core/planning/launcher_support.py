"""Which launcher starts which backend, and which engine's processes may become a run of it: as declared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.launcher import LOCAL, Launcher
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.plugins.manager import PluginManager

_SEVERAL = 2
"""Processes, where it matters only that there are more than one."""
_Refuses = Callable[[Adapter, int], str | None]
"""Why so many processes are no run of a backend."""


def require_launchable(launcher: Launcher, adapter: Adapter, processes: int) -> None:
    """Refuses what a launcher declares it cannot start.

    Args:
        launcher: That is to start them.
        adapter: Of the backend.
        processes: As many as there are slots for.

    Raises:
        UnsupportedError: It cannot start runs of this backend.
    """
    reason = launcher.refuses(adapter, processes)
    if reason:
        raise UnsupportedError(
            f"launcher {launcher.name!r} does not start backend {adapter.name!r}: {reason}."
            " `isotrain launchers` lists every pair."
        )


def why_not_from_here(launcher: Launcher) -> list[str]:
    """That a launcher cannot start runs from this machine, and what to do; or nothing."""
    found = launcher.availability()
    if found.available:
        return []
    return [f"launcher {launcher.name!r} cannot start runs here: {found.reason} ({found.hint})"]


def require_startable(launcher: Launcher) -> None:
    """Refuses to start a run where its launcher cannot.

    Raises:
        PlanError: It lacks something here.
    """
    for why in why_not_from_here(launcher):
        raise PlanError(f"{why}. `isotrain plan` and `isotrain run --dry-run` do without.")


def require_interface_used(interface: str | None, plan: Plan) -> None:
    """Refuses a network interface where no process of a run would talk over it.

    Raises:
        PlanError: All processes are on one machine.
    """
    if interface is not None and (plan.launcher == LOCAL or len(plan.processes) == 1):
        raise PlanError(
            "interface: all processes of this run are on this machine, where they talk over the loopback"
            " interface. Leave --interface (interface= in Python) out."
        )


def launchers(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every launcher; loads no framework.

    Each backend has whether several processes are `supported`, and one `alone`, and else the `reason`.
    """
    return [_launcher(host, name) for name in host.launchers.names()]


def environments(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every environment, with whether its processes may become a run of each backend, likewise."""
    return [_environment(host, name) for name in host.environments.names()]


def _launcher(host: PluginManager, name: str) -> dict[str, Any]:
    try:
        launcher = host.launcher(name)
        found = launcher.availability()
    except Exception as error:  # it may be anyone's; one that is broken must not hide the others
        return _described(host, name, None, functools.partial(_always, _broken(error)))
    availability = {"available": found.available, "reason": found.reason, "hint": found.hint}
    return {**_described(host, name, launcher.summary, launcher.refuses), **availability}


def _environment(host: PluginManager, name: str) -> dict[str, Any]:
    try:
        summary = host.environment(name).summary
    except Exception as error:  # as above
        return _described(host, name, None, functools.partial(_always, _broken(error)))
    return _described(host, name, summary, _does_not_join)


def _always(reason: str, adapter: Adapter, processes: int) -> str | None:
    return reason


def _does_not_join(adapter: Adapter, processes: int) -> str | None:
    return adapter.why_not_externally_started() if processes > 1 else None


def _why_not(host: PluginManager, backend: str, refuses: _Refuses, processes: int) -> str | None:
    try:
        return refuses(host.backend(backend), processes)
    except Exception as error:  # as above
        return _broken(error)


def _broken(error: Exception) -> str:
    return f"it cannot be loaded: {type(error).__name__}: {error}"


def _described(
    host: PluginManager, name: str, summary: str | None, refuses: _Refuses
) -> dict[str, Any]:
    pairs = {}
    for backend in host.backends.names():
        alone = _why_not(host, backend, refuses, 1)
        why = alone or _why_not(host, backend, refuses, _SEVERAL)
        pairs[backend] = {"supported": not why, "alone": not alone, "reason": why}
    return {"name": name, "summary": summary, "backends": pairs}
