"""A strategy that declares what it must, and nothing else."""

from __future__ import annotations

from typing import Any

from isotrain import Capability, Strategy
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.registries import StrategyRegistry


class Plain(Strategy):
    """Synchronous steps; it does not say that replicas are always equal."""

    name = "plain"
    summary = "synchronous steps"
    requires = frozenset({Capability.SYNCHRONOUS_STEP})

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        return group.synchronous_step(batch, learning_rate)


@hookimpl
def isotrain_register_strategies(register: StrategyRegistry) -> None:
    """Registers it."""
    register.add(Plain)
