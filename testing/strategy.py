"""Conformance checks of a strategy: their runs, and the choice of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.plan import split_backend
from isotrain.core.contracts.strategy import Invariant, Strategy
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.planning.planner import make_plan, missing_capabilities
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.session import Session
from isotrain.core.spec.loading import load_spec
from isotrain.testing import digits, strategy_runs
from isotrain.testing.checks import elastic as elastic_checks
from isotrain.testing.checks import resume as resume_checks
from isotrain.testing.checks import strategy as strategy_checks
from isotrain.testing.checks.strategy import Evidence
from isotrain.testing.launching import Run, on_device, try_run
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


def _where_updated_once(strategy: Strategy) -> str | None:
    if not strategy.updates_within_steps:
        return None
    return "the strategy says that it updates weights within a step"


def _where_ordered(strategy: Strategy) -> str | None:
    if strategy.applies_ordered_sums or strategy.requires == {Capability.SYNCHRONOUS_STEP}:
        return None
    return "the strategy does not say that it applies sums in one order"


def _where_invariant(invariant: Invariant) -> Callable[[Strategy], str | None]:
    def reason(strategy: Strategy) -> str | None:
        is_declared = invariant in strategy.invariants
        return None if is_declared else f"the strategy does not say that it conserves {invariant}"

    return reason


@dataclass(frozen=True)
class StrategyRun:
    """Run of a strategy, and the checks of its results.

    Attributes:
        work: Function that every rank runs; it returns the results.
        checks: Checks, each with a function that returns why it does not apply to a strategy, or None.
        replicas: Number of replicas; None for the number requested.
        changes: Changed fields of the spec.
    """

    work: Callable[[Session], dict[str, Any]]
    checks: Mapping[Check, Callable[[Strategy], str | None]]
    replicas: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def spec(
        self, name: str, options: Mapping[str, Any], adapter: Adapter | None = None
    ) -> dict[str, Any]:
        """Spec of the run with a strategy on a backend."""
        layout = plugin_manager().strategy(name, dict(options)).parallel_layout
        fields = digits.staged_fields(layout, self.replicas or 2) | dict(self.changes)
        strategy = {"name": name, "options": dict(options)}
        return digits.spec(**fields, adapter=adapter, strategy=strategy)

    def is_made(self, strategy: Strategy, adapter: Adapter) -> bool:
        """Whether one of the checks applies to a strategy on a backend."""
        capabilities = adapter.capabilities_for(strategy.parallel_layout.name)
        return not all(
            inapplicable(strategy) or check.obstacle(capabilities)
            for check, inapplicable in self.checks.items()
        )


DECLARATIONS = Check(strategy_checks.strategy_declarations)
STRATEGY_RUNS = (
    StrategyRun(
        strategy_runs.whole_training,
        {
            Check(strategy_checks.declares_what_it_uses): _always,
            Check(strategy_checks.loss_is_of_the_global_batch): _where_updated_once,
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
            ): _where_invariant(Invariant.PARAMETER_MEAN)
        },
        changes={"epochs": 1, "optimizer": {"name": "sgd", "lr": strategy_runs.TINY_RATE}},
    ),
    StrategyRun(
        strategy_runs.steady_gradient,
        {
            Check(strategy_checks.keeps_gradient_sum): _where_invariant(Invariant.GRADIENT_SUM),
        },
        changes={
            "count": digits.GLOBAL_BATCH,
            "shuffle": False,
            "epochs": strategy_runs.WHOLE + 1,
            "optimizer": {"name": "sgd", "lr": strategy_runs.SMALL_RATE},
        },
    ),
    StrategyRun(
        strategy_runs.ordered_steps,
        {
            Check(
                strategy_checks.ordered_sums_keep_bits, frozenset({Capability.ORDERED_SUMS})
            ): _where_ordered
        },
        changes={"epochs": 1, "reproducible": "bits"},
    ),
)
"""Runs of a strategy, one after the other; each starts anew with its own processes."""

RESUMES = Check(resume_checks.strategy_resumes_exactly, frozenset({Capability.NAMED_STATE}))
"""Check that starts its own runs."""

ELASTIC = Check(elastic_checks.elastic_as_declared)
"""Check that starts its own runs, on the reference backend."""

CHECKS = (
    DECLARATIONS,
    *(check for trial in STRATEGY_RUNS for check in trial.checks),
    RESUMES,
    ELASTIC,
)
"""All checks of a strategy, in the order of a scorecard."""


def check_strategy(
    name: str,
    *,
    backend: str | None = None,
    replicas: int = 2,
    options: Mapping[str, Any] | None = None,
) -> Scorecard:
    """Makes every check that applies to a strategy.

    Args:
        name: Registered strategy.
        backend: `NAME` or `NAME:COLLECTIVE`; by default the first available backend with the capabilities
            that the strategy requires.
        replicas: Number of replicas, at least 2.
        options: Strategy options.

    Raises:
        PlanError: The backend lacks what the strategy requires, or no available backend has it.
    """
    digits.require()
    plugins, with_options = plugin_manager(), dict(options or {})
    strategy = plugins.strategy(name, with_options)
    chosen = backend or fitting_backend(strategy, plugins)
    adapter = plugins.backend(split_backend(chosen)[0])
    for trial in STRATEGY_RUNS:
        if trial.is_made(strategy, adapter):
            count = trial.replicas or replicas
            spec = load_spec(on_device(trial.spec(name, with_options, adapter)))
            make_plan(ResolvedSpec(spec, plugins), backend=chosen, replicas=count)
    results = [outcome_of(DECLARATIONS, strategy)]
    for trial in STRATEGY_RUNS:

        def run(trial: StrategyRun = trial) -> Run:
            count = trial.replicas or replicas
            return try_run(trial.work, trial.spec(name, with_options, adapter), chosen, count)

        results += outcomes(trial, strategy, adapter, run)
    results.append(resume_outcome(name, with_options, chosen))
    results.append(elastic_outcome(name, with_options))
    return Scorecard("strategy", name, chosen, replicas, tuple(results))


def resume_outcome(name: str, options: Mapping[str, Any], backend: str) -> Outcome:
    """Makes `RESUMES`; skipped where the strategy says what a resumed run loses."""
    plugins = plugin_manager()
    adapter = plugins.backend(split_backend(backend)[0])
    strategy = plugins.strategy(name, dict(options))
    resume_notes = " ".join(
        strategy.resume_notes(strategy.name, resume_checks.REPLICAS, resume_checks.REPLICAS)
    )
    obstacle = resume_notes or RESUMES.obstacle(
        adapter.capabilities_for(strategy.parallel_layout.name)
    )
    if obstacle:
        return RESUMES.skipped(obstacle)
    return outcome_of(RESUMES, name, options, backend)


def elastic_outcome(name: str, options: Mapping[str, Any]) -> Outcome:
    """Makes `ELASTIC`; skipped where the strategy is not elastic, or does not fit the runs."""
    plugins = plugin_manager()
    obstacle = plugins.strategy(name, dict(options)).why_not_elastic()
    if obstacle:
        return ELASTIC.skipped(obstacle)
    spec = ResolvedSpec(load_spec(elastic_checks.elastic_case(name, options)), plugins)
    try:
        make_plan(spec, backend=elastic_checks.BACKEND, replicas=elastic_checks.REPLICAS)
    except IsotrainError as error:
        return ELASTIC.skipped(str(error))
    return outcome_of(ELASTIC, name, options)


def fitting_backend(strategy: Strategy, host: PluginManager) -> str:
    """Name of the first available backend that has what a strategy requires.

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
    """Outcomes of the checks of one run; `start` makes it, and is not called when no check applies."""
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
