"""Registers the strategies that come with isotrain, by the hook that a third party uses."""

from __future__ import annotations

from isotrain.core.hookspecs import hookimpl
from isotrain.core.registers import StrategyRegister


@hookimpl
def isotrain_register_strategies(register: StrategyRegister) -> None:
    """Registers each strategy by reference, so that none is imported before it is used."""
    register.add("isotrain.strategies.data_parallel:DataParallel", name="data-parallel")
