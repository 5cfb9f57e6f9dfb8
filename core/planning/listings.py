"""What is registered, as plain values: backends, strategies, and which pairs of them fit."""

from __future__ import annotations

from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.contracts.usability import Usability
from isotrain.core.plugins.host import PluginHost


def backends(host: PluginHost) -> list[dict[str, Any]]:
    """Describes every backend; loads no framework."""
    return [_backend(host, name) for name in host.backends.names()]


def _backend(host: PluginHost, name: str) -> dict[str, Any]:
    try:
        adapter = host.backend(name)
        found = adapter.usability()
    except (
        Exception
    ) as error:  # an adapter may be anyone's; one that is broken must not hide the others
        return _broken(name, f"{type(error).__name__}: {error}")
    return {
        "name": name,
        "framework": adapter.framework,
        "summary": adapter.summary,
        "collectives": dict(adapter.collectives),
        "replicas_per_process": adapter.replicas_per_process,
        "options": dict(adapter.options),
        **_usability(found),
    }


def _broken(name: str, reason: str) -> dict[str, Any]:
    hint = "repair or remove the plugin that registers it"
    return {
        "name": name,
        "framework": None,
        "summary": None,
        "collectives": {},
        "replicas_per_process": None,
        "options": {},
        **_usability(Usability(False, None, reason, hint)),
    }


def _usability(found: Usability) -> dict[str, Any]:
    return {
        "usable": found.usable,
        "version": found.version,
        "reason": found.reason,
        "hint": found.hint,
    }


def strategies(host: PluginHost) -> list[dict[str, Any]]:
    """Describes every strategy, with each backend's yes or the reason for its no."""
    from isotrain.core.planning.make_plan import (
        missing_capabilities,  # late: `backends` must not load the spec
    )

    adapters: dict[str, Adapter | str] = {}
    for name in host.backends.names():
        try:
            adapters[name] = host.backend(name)
        except Exception as error:  # as above
            adapters[name] = f"it cannot be loaded: {type(error).__name__}: {error}"
    listed = []
    for name in host.strategies.names():
        try:
            strategy = host.strategies.get(name)
        except Exception as error:  # as above
            reason = f"the strategy cannot be loaded: {type(error).__name__}: {error}"
            listed.append(_strategy(name, None, {backend: [reason] for backend in adapters}))
            continue
        reasons = {
            backend: [found] if isinstance(found, str) else missing_capabilities(strategy, found)
            for backend, found in adapters.items()
        }
        listed.append(_strategy(name, strategy, reasons))
    return listed


def _strategy(
    name: str, strategy: type[Strategy] | None, reasons: dict[str, list[str]]
) -> dict[str, Any]:
    return {
        "name": name,
        "summary": strategy.summary if strategy else None,
        "requires": sorted(strategy.requires) if strategy else [],
        "backends": {
            backend: {"supported": not found, "reason": "; ".join(found) or None}
            for backend, found in reasons.items()
        },
    }
