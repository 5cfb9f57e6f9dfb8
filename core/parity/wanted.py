"""The runs that a check of parity is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.core.errors import PlanError
from isotrain.core.spec.parts import StrategyChoice, StrategyLike
from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class Wanted:
    """A run that was asked for.

    Attributes:
        backend: `NAME[:COLLECTIVE]`.
        replicas: How many.
        strategy: `NAME[,OPTION=VALUE...]`.
        name: What it is called; has the strategy where there are several.
        spec: What it trains.
    """

    backend: str
    replicas: int
    strategy: str
    name: str
    spec: TrainingSpec


def all_wanted(
    spec: TrainingSpec,
    backends: Sequence[str],
    replicas: Sequence[int],
    strategies: Sequence[StrategyLike],
) -> list[Wanted]:
    """Every run, each once, the reference first."""
    found = {}
    for choice in map(StrategyChoice.of, strategies):
        for count in replicas:
            for backend in backends:
                name = f"{backend}@{count}" + (f" {choice.label}" if len(strategies) > 1 else "")
                own = spec.under(choice)
                found[name] = Wanted(backend, count, own.strategy.label, name, own)
    if len(found) < 2:
        raise PlanError(
            "parity: there is nothing to compare. Name two backends (--backend A --backend B), two"
            " numbers of replicas (--replicas 1,2) or two strategies (--strategy A --strategy B)."
        )
    return list(found.values())
