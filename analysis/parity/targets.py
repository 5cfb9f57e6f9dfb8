"""The runs that a check of parity is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.errors import PlanError
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.sections import StrategyChoice, StrategyLike
from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class ParityTarget:
    """A run that was asked for.

    Attributes:
        backend: `NAME[:COLLECTIVE]`.
        replicas: How many.
        strategy: `NAME[,OPTION=VALUE...]`.
        name: What it is called; has the strategy where there are several.
        spec: What it trains.
        launcher: What starts its processes.
    """

    backend: str
    replicas: int
    strategy: str
    name: str
    spec: TrainingSpec
    launcher: LauncherChoice


def parity_targets(
    spec: TrainingSpec,
    host: PluginManager,
    *,
    backends: Sequence[str],
    replicas: Sequence[int] | None,
    strategies: Sequence[StrategyLike],
    launcher: LauncherChoice,
) -> list[ParityTarget]:
    """Every run, each once, the reference first.

    Args:
        spec: What they train.
        host: Knows backends and launchers.
        backends: `NAME` or `NAME:COLLECTIVE`.
        replicas: Numbers of them; None: 1, or as many as the launcher's hosts give.
        strategies: One or more.
        launcher: What starts their processes.

    Raises:
        PlanError: There is just one, or a launcher has no place for it.
    """
    found = {}
    if replicas is None and launcher.name == LOCAL:
        replicas = (1,)
    for choice in map(StrategyChoice.of, strategies):
        own = spec.with_strategy(choice)
        for asked in (None,) if replicas is None else replicas:
            for backend in backends:
                count = asked or _replicas_there(own, host, backend, launcher)
                name = f"{backend}@{count}" + (f" {choice.label}" if len(strategies) > 1 else "")
                label = own.strategy.label
                found[name] = ParityTarget(backend, count, label, name, own, launcher)
    if len(found) < 2:
        raise PlanError(
            "parity: there is nothing to compare. Name two backends (--backend A --backend B), two"
            " numbers of replicas (--replicas 1,2) or two strategies (--strategy A --strategy B)."
        )
    return list(found.values())


def _replicas_there(
    spec: TrainingSpec, host: PluginManager, backend: str, launcher: LauncherChoice
) -> int:
    plan = make_plan(ResolvedSpec(spec, host), backend=backend, replicas=None, launcher=launcher)
    return plan.replicas
