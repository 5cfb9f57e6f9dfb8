"""The runs that a parity check compares."""

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
    """A requested run.

    Attributes:
        backend: Backend, `NAME` or `NAME:COLLECTIVE`.
        replicas: Number of replicas.
        strategy: Strategy, `NAME[,OPTION=VALUE...]`.
        name: Run name; includes the strategy where several are compared.
        spec: Training spec of the run.
        launcher: Launcher that starts its processes.
    """

    backend: str
    replicas: int
    strategy: str
    name: str
    spec: TrainingSpec
    launcher: LauncherChoice


def require_one_update(spec: TrainingSpec) -> None:
    """Refuses a spec with named updates: a step is traced with the gradients of one optimizer.

    Raises:
        PlanError: The spec has updates.
    """
    if spec.updates:
        raise PlanError(
            f"parity: expected a spec with one optimizer, found updates ({', '.join(spec.updates)}), each"
            " with one of its own: gradients of such a step are not traced."
        )


def parity_targets(
    spec: TrainingSpec,
    host: PluginManager,
    *,
    backends: Sequence[str],
    replicas: Sequence[int] | None,
    strategies: Sequence[StrategyLike],
    launcher: LauncherChoice,
) -> list[ParityTarget]:
    """The distinct requested runs, the reference first; for None as many replicas as the allocation holds.

    Raises:
        PlanError: The launcher's allocation has no room for one.
    """
    targets = {}
    if replicas is None and launcher.name == LOCAL:
        replicas = (1,)
    for choice in map(StrategyChoice.of, strategies):
        run_spec = spec.with_strategy(choice)
        for requested in (None,) if replicas is None else replicas:
            for backend in backends:
                count = requested or _replicas_there(run_spec, host, backend, launcher)
                name = f"{backend}@{count}" + (f" {choice.label}" if len(strategies) > 1 else "")
                label = run_spec.strategy.label
                targets[name] = ParityTarget(backend, count, label, name, run_spec, launcher)
    return list(targets.values())


def _replicas_there(
    spec: TrainingSpec, host: PluginManager, backend: str, launcher: LauncherChoice
) -> int:
    plan = make_plan(ResolvedSpec(spec, host), backend=backend, replicas=None, launcher=launcher)
    return plan.replicas
