"""How the checks of a strategy are made, and on which backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.capabilities import Capability
from isotrain.core.contracts.plan import split_backend
from isotrain.core.contracts.strategy import Invariant, Strategy
from isotrain.core.errors import PlanError
from isotrain.core.planning.planner import make_plan, missing_capabilities
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.session import Session
from isotrain.core.spec.loading import load_spec
from isotrain.testing import digits, strategy_runs
from isotrain.testing.checks import resume as resume_checks
from isotrain.testing.checks import strategy as strategy_checks
from isotrain.testing.checks.strategy import Evidence
from isotrain.testing.launching import Run, try_run
from isotrain.testing.scorecard import Check, Outcome, Scorecard, outcome_of


def _always(strategy: Strategy) -> str | None:
    return None


def _where_equal(strategy: Strategy) -> str | None:
    never = strategy.keeps_replicas_equal == "never"
    return "the strategy does not say that it keeps replicas equal" if never else None


def _where_synchronous(strategy: Strategy) -> str | None:
    if strategy.equals_data_parallel:
        return None
    return "the strategy does not say that it equals data parallelism"


def _where_conserved(kept: Invariant) -> Callable[[Strategy], str | None]:
    def reason(strategy: Strategy) -> str | None:
        says = kept in strategy.invariants
        return None if says else f"the strategy does not say that it conserves {kept}"

    return reason


@dataclass(frozen=True)
class StrategyRun:
    """A run of a strategy and the checks of what it shows.

    Attributes:
        work: Of every process.
        checks: Each with what makes it inapplicable to a strategy: a reason, or None.
        replicas: How many, where not as many as asked for.
        changes: Of the spec.
    """

    work: Callable[[Session], dict[str, Any]]
    checks: Mapping[Check, Callable[[Strategy], str | None]]
    replicas: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def spec(
        self, name: str, options: Mapping[str, Any], adapter: Adapter | None = None
    ) -> dict[str, Any]:
        """Of the run with a strategy on a backend."""
        chosen = {"name": name, "options": dict(options)}
        return digits.spec(**self.changes, adapter=adapter, strategy=chosen)


DECLARATIONS = Check(strategy_checks.strategy_declarations)
STRATEGY_RUNS = (
    StrategyRun(
        strategy_runs.whole_training,
        {
            Check(strategy_checks.declares_what_it_uses): _always,
            Check(strategy_checks.loss_is_of_the_global_batch): _always,
            Check(strategy_checks.replicas_are_equal): _where_equal,
            Check(strategy_checks.equals_data_parallel): _where_synchronous,
            Check(strategy_checks.converges_on_digits): _always,
        },
    ),
    StrategyRun(
        strategy_runs.whole_training, {Check(strategy_checks.survives_one_replica): _always}, 1
    ),
    StrategyRun(
        strategy_runs.one_image,
        {
            Check(strategy_checks.survives_empty_replicas): _always,
            Check(
                strategy_checks.state_bytes_as_declared, frozenset({Capability.NAMED_STATE})
            ): _always,
        },
        changes={
            "count": 1,
            "global_batch_size": 1,
            "epochs": 4,
            "optimizer": {"name": "sgd", "lr": digits.RATE, "momentum": 0.5},
        },
    ),
    StrategyRun(
        strategy_runs.exchange_alone,
        {
            Check(
                strategy_checks.keeps_parameter_mean,
                frozenset({Capability.LOCAL_STEP, Capability.AVERAGE_PARAMETERS}),
            ): _where_conserved(Invariant.PARAMETER_MEAN)
        },
        changes={"epochs": 1, "optimizer": {"name": "sgd", "lr": strategy_runs.TINY_RATE}},
    ),
    StrategyRun(
        strategy_runs.steady_gradient,
        {
            Check(strategy_checks.keeps_gradient_sum): _where_conserved(Invariant.GRADIENT_SUM),
        },
        changes={
            "count": digits.GLOBAL_BATCH,
            "shuffle": False,
            "epochs": strategy_runs.WHOLE + 1,
            "optimizer": {"name": "sgd", "lr": strategy_runs.SMALL_RATE},
        },
    ),
)
"""The runs of a strategy, one after the other, each of it anew: nothing of one carries over."""

RESUMES = Check(resume_checks.strategy_resumes_exactly, frozenset({Capability.NAMED_STATE}))
"""Has runs of its own."""

CHECKS = (DECLARATIONS, *(check for trial in STRATEGY_RUNS for check in trial.checks), RESUMES)
"""All of them, in the order of a scorecard."""


def check_strategy(
    name: str,
    *,
    backend: str | None = None,
    replicas: int = 2,
    options: Mapping[str, Any] | None = None,
) -> Scorecard:
    """Makes every check that applies to a strategy.

    Args:
        name: Of a registered strategy.
        backend: `NAME` or `NAME:COLLECTIVE`; left out, the first usable one that has what it requires.
        replicas: At least 2.
        options: Of the strategy.

    Raises:
        PlanError: The strategy and the backend do not fit together, or no backend fits.
    """
    digits.require()
    host, given = plugin_manager(), dict(options or {})
    strategy = host.strategy(name, given)
    chosen = backend or fitting_backend(strategy, host)
    adapter = host.backend(split_backend(chosen)[0])
    for trial in STRATEGY_RUNS:
        count = trial.replicas or replicas
        spec = load_spec(trial.spec(name, given, adapter))
        make_plan(ResolvedSpec(spec, host), backend=chosen, replicas=count)
    card = [outcome_of(DECLARATIONS, strategy)]
    for trial in STRATEGY_RUNS:

        def run(trial: StrategyRun = trial) -> Run:
            count = trial.replicas or replicas
            return try_run(trial.work, trial.spec(name, given, adapter), chosen, count)

        card += outcomes(trial, strategy, adapter, run)
    card.append(resume_outcome(name, given, chosen))
    return Scorecard("strategy", name, chosen, replicas, tuple(card))


def resume_outcome(name: str, options: Mapping[str, Any], backend: str) -> Outcome:
    """Makes `GOES_ON`."""
    host = plugin_manager()
    adapter = host.backend(split_backend(backend)[0])
    strategy = host.strategy(name, dict(options))
    lost = " ".join(
        strategy.resume_notes(strategy.name, resume_checks.REPLICAS, resume_checks.REPLICAS)
    )
    obstacle = lost or RESUMES.obstacle(adapter.capabilities_for(strategy.parallel_layout.name))
    if obstacle:
        return RESUMES.skipped(obstacle)
    return outcome_of(RESUMES, name, options, backend)


def fitting_backend(strategy: Strategy, host: PluginManager) -> str:
    """The first usable backend that has what a strategy requires.

    Raises:
        PlanError: There is none.
    """
    reasons = []
    for name in host.backends.names():
        adapter = host.backend(name)
        availability = adapter.availability()
        missing = missing_capabilities(strategy, adapter)
        if availability.available and not missing:
            return name
        reasons.append(f"{name}: {'; '.join(missing) or availability.reason}")
    raise PlanError(
        f"no usable backend has what the strategy {strategy.name!r} requires. " + ". ".join(reasons)
    )


def outcomes(
    trial: StrategyRun, strategy: Strategy, adapter: Adapter, start: Callable[[], Run]
) -> Iterator[Outcome]:
    """Of one trial.

    Args:
        trial: Which.
        strategy: That is tried.
        adapter: Of the backend.
        start: Makes the run; not called when none of the checks applies.
    """
    run, can = None, adapter.capabilities_for(strategy.parallel_layout.name)
    for check, inapplicable in trial.checks.items():
        obstacle = inapplicable(strategy) or check.obstacle(can)
        if obstacle:
            yield check.skipped(obstacle)
            continue
        run = run or start()
        if run.failure is not None:
            yield check.failed(f"the run failed: {run.failure}")
        else:
            yield outcome_of(check, Evidence(strategy, run.returned))
