"""What is registered, as plain values: backends, strategies, and which pairs of them fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.capabilities import Availability
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.plugins.manager import PluginManager


def backends(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every backend; loads no framework."""
    return [_backend(host, name) for name in host.backends.names()]


def _backend(host: PluginManager, name: str) -> dict[str, Any]:
    try:
        adapter = host.backend(name)
        found = adapter.availability()
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
        **_usability(Availability(False, None, reason, hint)),
    }


def _usability(found: Availability) -> dict[str, Any]:
    return {
        "available": found.available,
        "version": found.version,
        "reason": found.reason,
        "hint": found.hint,
    }


def strategies(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every strategy, with each backend's yes or the reason for its no."""
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
            others = _variants(name, strategy, host)
        except Exception as error:  # as above
            reason = f"the strategy cannot be loaded: {type(error).__name__}: {error}"
            listed.append(_listed(name, None, [], {backend: [reason] for backend in adapters}))
            continue
        listed.append(_fitted(name, strategy, strategy.summary, adapters))
        for given, other in others.items():
            listed.append(_fitted(given, other, other.summary, adapters))
    return listed


def _variants(name: str, strategy: type[Strategy], host: PluginManager) -> dict[str, Strategy]:
    """With which options a strategy asks other things of backends, by `NAME,OPTION=VALUE`."""
    return {
        ",".join(
            [name, *(f"{key}={_word(value)}" for key, value in options.items())]
        ): host.strategy(name, dict(options))
        for options in strategy.variants
    }


def _word(value: Any) -> str:
    """A value as one writes it on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fitted(
    name: str,
    strategy: Strategy | type[Strategy],
    summary: str,
    adapters: Mapping[str, Adapter | str],
) -> dict[str, Any]:
    from isotrain.core.planning.planner import (
        missing_capabilities,
    )  # late: `backends` must not load the spec

    reasons = {
        backend: [found] if isinstance(found, str) else missing_capabilities(strategy, found)
        for backend, found in adapters.items()
    }
    return _listed(name, summary, sorted(strategy.requires), reasons)


def _listed(
    name: str, summary: str | None, requires: list[str], reasons: Mapping[str, list[str]]
) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary,
        "requires": requires,
        "backends": {
            backend: {"supported": not found, "reason": "; ".join(found) or None}
            for backend, found in reasons.items()
        },
    }
