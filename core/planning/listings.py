"""Lists registered backends and strategies, and which pairs of them work, as plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import Availability
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.plugins.manager import PluginManager

if TYPE_CHECKING:
    from isotrain.core.spec.sections import StrategyChoice


def backends(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every backend; loads no framework."""
    return [_describe_backend(host, name) for name in host.backends.names()]


def _describe_backend(host: PluginManager, name: str) -> dict[str, Any]:
    try:
        adapter = host.backend(name)
        availability = adapter.availability()
    except Exception as error:  # a broken plugin must not hide the others
        return _describe_broken(name, f"{type(error).__name__}: {error}")
    return {
        "name": name,
        "framework": adapter.framework,
        "summary": adapter.summary,
        "collectives": dict(adapter.collectives),
        "replicas_per_process": adapter.replicas_per_process,
        "options": dict(adapter.options),
        **_availability_fields(availability),
    }


def _describe_broken(name: str, reason: str) -> dict[str, Any]:
    hint = "repair or remove the plugin that registers it"
    return {
        "name": name,
        "framework": None,
        "summary": None,
        "collectives": {},
        "replicas_per_process": None,
        "options": {},
        **_availability_fields(Availability(False, None, reason, hint)),
    }


def _availability_fields(availability: Availability) -> dict[str, Any]:
    return {
        "available": availability.available,
        "version": availability.version,
        "reason": availability.reason,
        "hint": availability.hint,
    }


def memory_saving_strategies(host: PluginManager) -> list[tuple[StrategyChoice, Strategy]]:
    """Every strategy that declares options that save memory, with the choice of it and them."""
    # late: `backends` must not import pydantic
    from isotrain.core.spec.sections import StrategyChoice

    strategies = []
    for name in host.strategies.names():
        with contextlib.suppress(Exception):  # third-party code, and needed for advice only
            for options in host.strategies.get(name).memory_saving:
                choice = StrategyChoice(name=name, options=dict(options))
                strategies.append((choice, host.strategy(name, choice.options)))
    return strategies


def strategies(host: PluginManager) -> list[dict[str, Any]]:
    """Describes every strategy with its support by each backend, and the reason if there is none."""
    adapters: dict[str, Adapter | str] = {}
    for name in host.backends.names():
        try:
            adapters[name] = host.backend(name)
        except Exception as error:  # as above
            adapters[name] = f"it cannot be loaded: {type(error).__name__}: {error}"
    entries = []
    for name in host.strategies.names():
        try:
            strategy = host.strategies.get(name)
            variants = _variants(name, strategy, host)
        except Exception as error:  # as above
            reason = f"the strategy cannot be loaded: {type(error).__name__}: {error}"
            entries.append(
                _strategy_entry(name, None, [], {backend: [reason] for backend in adapters})
            )
            continue
        entries.append(_describe_strategy(name, strategy, strategy.summary, adapters))
        for label, variant in variants.items():
            entries.append(_describe_strategy(label, variant, variant.summary, adapters))
    return entries


def _variants(name: str, strategy: type[Strategy], host: PluginManager) -> dict[str, Strategy]:
    """Variants of a strategy whose options change the required capabilities, by `NAME,OPTION=VALUE`."""
    return {
        ",".join(
            [name, *(f"{key}={_to_option_text(value)}" for key, value in options.items())]
        ): host.strategy(name, dict(options))
        for options in strategy.variants
    }


def _to_option_text(value: Any) -> str:
    """An option's value as written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe_strategy(
    name: str,
    strategy: Strategy | type[Strategy],
    summary: str,
    adapters: Mapping[str, Adapter | str],
) -> dict[str, Any]:
    # late: `backends` must not import pydantic
    from isotrain.core.planning.planner import missing_capabilities

    reasons = {
        backend: [adapter] if isinstance(adapter, str) else missing_capabilities(strategy, adapter)
        for backend, adapter in adapters.items()
    }
    return _strategy_entry(name, summary, sorted(strategy.requires), reasons)


def _strategy_entry(
    name: str, summary: str | None, requires: list[str], reasons: Mapping[str, list[str]]
) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary,
        "requires": requires,
        "backends": {
            backend: {"supported": not missing, "reason": "; ".join(missing) or None}
            for backend, missing in reasons.items()
        },
    }
