"""Which launcher starts which backend, and which engine's processes may become a run of it: as declared."""

from __future__ import annotations

from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.launcher import Launcher
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.plugins.host import PluginHost


def require_launchable(launcher: Launcher, adapter: Adapter) -> None:
    """Refuses what a launcher declares it cannot start.

    Raises:
        UnsupportedError: It cannot start runs of this backend.
    """
    reason = launcher.refuses(adapter)
    if reason:
        raise UnsupportedError(
            f"launcher {launcher.name!r} does not start backend {adapter.name!r}: {reason}."
            " `isotrain launchers` lists every pair."
        )


def why_not_from_here(launcher: Launcher) -> list[str]:
    """That a launcher cannot start runs from this machine, and what to do; or nothing."""
    found = launcher.usability()
    if found.usable:
        return []
    return [f"launcher {launcher.name!r} cannot start runs here: {found.reason} ({found.hint})"]


def require_startable(launcher: Launcher) -> None:
    """Refuses to start a run where its launcher cannot.

    Raises:
        PlanError: It lacks something here.
    """
    for why in why_not_from_here(launcher):
        raise PlanError(f"{why}. `isotrain plan` and `isotrain run --dry-run` do without.")


def launchers(host: PluginHost) -> list[dict[str, Any]]:
    """Describes every launcher, with each backend's yes or the reason for its no; loads no framework."""
    return [_launcher(host, name) for name in host.launchers.names()]


def environments(host: PluginHost) -> list[dict[str, Any]]:
    """Describes every environment, with whether its processes may become a run of each backend."""
    return [_environment(host, name) for name in host.environments.names()]


def _launcher(host: PluginHost, name: str) -> dict[str, Any]:
    try:
        launcher = host.launcher(name)
        found = launcher.usability()
    except Exception as error:  # it may be anyone's; one that is broken must not hide the others
        return _described(name, None, dict.fromkeys(host.backends.names(), _broken(error)))
    reasons = {each: _why_not(host, each, launcher) for each in host.backends.names()}
    usability = {"usable": found.usable, "reason": found.reason, "hint": found.hint}
    return {**_described(name, launcher.summary, reasons), **usability}


def _environment(host: PluginHost, name: str) -> dict[str, Any]:
    try:
        summary = host.environment(name).summary
    except Exception as error:  # as above
        return _described(name, None, dict.fromkeys(host.backends.names(), _broken(error)))
    reasons = {each: _why_not(host, each) for each in host.backends.names()}
    return _described(name, summary, reasons)


def _why_not(host: PluginHost, backend: str, launcher: Launcher | None = None) -> str | None:
    try:
        adapter = host.backend(backend)
        return launcher.refuses(adapter) if launcher else adapter.why_not_joined()
    except Exception as error:  # as above
        return _broken(error)


def _broken(error: Exception) -> str:
    return f"it cannot be loaded: {type(error).__name__}: {error}"


def _described(name: str, summary: str | None, reasons: dict[str, str | None]) -> dict[str, Any]:
    pairs = {each: {"supported": not why, "reason": why} for each, why in reasons.items()}
    return {"name": name, "summary": summary, "backends": pairs}
