"""Declared support: which launchers and cluster environments work with which backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.launcher import LOCAL, Launcher
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.plugins.manager import PluginManager

_MULTI_PROCESS = 2
"""A number of processes that stands for any number above one."""
_RefusalReason = Callable[[Adapter, int], str | None]
"""Returns why a backend cannot run with so many processes; None if it can."""


def require_launchable(launcher: Launcher, adapter: Adapter, processes: int) -> None:
    """Checks that a launcher can start runs of a backend, as it declares.

    Args:
        launcher: Launcher of the run.
        adapter: Adapter of the backend.
        processes: Number of processes.

    Raises:
        UnsupportedError: It cannot.
    """
    reason = launcher.refuses(adapter, processes)
    if reason:
        raise UnsupportedError(
            f"launcher {launcher.name!r} does not start backend {adapter.name!r}: {reason}."
            " `isotrain launchers` lists every pair."
        )


def why_not_from_here(launcher: Launcher) -> list[str]:
    """A note if a launcher is not available on this machine, with the reason and a hint; else empty."""
    availability = launcher.availability()
    if availability.available:
        return []
    return [
        f"launcher {launcher.name!r} cannot start runs here: {availability.reason} ({availability.hint})"
    ]


def require_startable(launcher: Launcher) -> None:
    """Checks that a launcher is available on this machine.

    Raises:
        PlanError: It is not.
    """
    for note in why_not_from_here(launcher):
        raise PlanError(f"{note}. `isotrain plan` and `isotrain run --dry-run` do not need it.")


def require_interface_used(interface: str | None, plan: Plan) -> None:
    """Refuses a network interface for a run whose processes do not use it.

    Raises:
        PlanError: All processes are on one machine.
    """
    if interface is not None and (plan.launcher == LOCAL or len(plan.processes) == 1):
        raise PlanError(
            "interface: all processes of this run are on this machine, where they communicate over the"
            " loopback interface. Leave --interface (interface= in Python) out."
        )


def launchers(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every launcher with its support for each backend; loads no framework.

    Each backend has `supported` (for several processes), `alone` (for a single process) and the `reason`
    if it is not supported.
    """
    return [_launcher(host, name) for name in host.launchers.names()]


def environments(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every cluster environment with its support for each backend, as `launchers`."""
    return [_environment(host, name) for name in host.environments.names()]


def _launcher(host: PluginManager, name: str) -> dict[str, Any]:
    try:
        launcher = host.launcher(name)
        found = launcher.availability()
    except Exception as error:  # a broken plugin must not hide the others
        return _describe(host, name, None, functools.partial(_constant_reason, _load_error(error)))
    availability = {"available": found.available, "reason": found.reason, "hint": found.hint}
    return {**_describe(host, name, launcher.summary, launcher.refuses), **availability}


def _environment(host: PluginManager, name: str) -> dict[str, Any]:
    try:
        summary = host.environment(name).summary
    except Exception as error:  # as above
        return _describe(host, name, None, functools.partial(_constant_reason, _load_error(error)))
    return _describe(host, name, summary, _why_not_joined)


def _constant_reason(reason: str, adapter: Adapter, processes: int) -> str | None:
    return reason


def _why_not_joined(adapter: Adapter, processes: int) -> str | None:
    return adapter.why_not_externally_started() if processes > 1 else None


def _refusal(
    host: PluginManager, backend: str, refuses: _RefusalReason, processes: int
) -> str | None:
    try:
        return refuses(host.backend(backend), processes)
    except Exception as error:  # as above
        return _load_error(error)


def _load_error(error: Exception) -> str:
    return f"it cannot be loaded: {type(error).__name__}: {error}"


def _describe(
    host: PluginManager, name: str, summary: str | None, refuses: _RefusalReason
) -> dict[str, Any]:
    support = {}
    for backend in host.backends.names():
        single_process_refusal = _refusal(host, backend, refuses, 1)
        reason = single_process_refusal or _refusal(host, backend, refuses, _MULTI_PROCESS)
        support[backend] = {
            "supported": not reason,
            "alone": not single_process_refusal,
            "reason": reason,
        }
    return {"name": name, "summary": summary, "backends": support}
