"""Conformance checks of a backend, and the runs that make them."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.adapter_protocols import NamedUpdatesBackend
from isotrain.core.contracts.backend.capabilities import Availability, Capabilities, Capability
from isotrain.core.contracts.parallel_layout import REPLICATED
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, UnsupportedError
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.session import Session
from isotrain.core.spec.loading import load_spec
from isotrain.testing import reference_model
from isotrain.testing.check_context import CheckContext
from isotrain.testing.checks import (
    collectives,
    computations,
    objectives,
    ordered_sums,
    random_layers,
)
from isotrain.testing.checks import crashes as crash_checks
from isotrain.testing.checks import resume as resume_checks
from isotrain.testing.checks import state as state_checks
from isotrain.testing.checks import training as training_checks
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.launching import Notes, Run, on_device, try_run
from isotrain.testing.scorecard import (
    Check,
    Outcome,
    Scorecard,
    SessionCheck,
    outcome_of,
    outcome_of_processes,
)

STEP = Capability.SYNCHRONOUS_STEP
STATE = Capability.NAMED_STATE
GRADIENTS = Capability.GRADIENTS
COMPUTE = Capability.COMPUTE
_UNKNOWN = "no-such-thing"
LAYOUT = REPLICATED.name
"""Parallel layout of the checked groups; parameter-server groups are checked through a strategy."""
EXIT_SECONDS = 4.0
"""Limit in seconds from the end of the work to the exit of the processes."""


def declarations(adapter: Adapter) -> None:
    """In every parallel layout, a capability is there or lacking with a reason; a collective is there."""
    declared = adapter.capabilities
    assert REPLICATED.name in declared, f"{REPLICATED.name}: nothing is declared"
    for parallel_layout, can in declared.items():
        _assert_declared_once(parallel_layout, can)
    assert adapter.collectives, "no collective"
    assert adapter.replicas_per_process in ("one", "all"), adapter.replicas_per_process
    assert isinstance(adapter.availability(), Availability), "availability() gives no Availability"


def _assert_declared_once(parallel_layout: str, can: Capabilities) -> None:
    for capability in Capability:
        declared = (capability in can.has) + (capability in can.lacks)
        assert declared == 1, (
            f"{parallel_layout}: {capability} is in {declared} of `has` and `lacks`; expected in one"
        )
        assert can.lacks.get(capability, "-").strip(), (
            f"{parallel_layout}: {capability} is lacking without a reason"
        )
    unknown = {*can.has, *can.lacks} - set(Capability)
    assert not unknown, f"{parallel_layout}: no capabilities: {sorted(map(str, unknown))}"


def unknown_choices_are_refused(adapter: Adapter) -> None:
    """A collective or an option that the backend does not know is an error that names it."""
    options = {"backend_options": {adapter.name: {_UNKNOWN: 1}}}
    spec = load_spec(reference_model.spec(adapter, **options))
    messages = {}
    try:
        adapter.resolve_collective(_UNKNOWN, device="cpu", replicas=2)
    except UnsupportedError as error:
        messages["collective"] = str(error)
    try:
        adapter.check_options(spec)
    except IsotrainError as error:
        messages["option"] = str(error)
    for kind in ("collective", "option"):
        assert kind in messages, f"the {kind} {_UNKNOWN!r} was accepted"
        assert _UNKNOWN in messages[kind], f"the {kind} {_UNKNOWN!r} is not named: {messages[kind]}"


def _check(function: Any, *needs: Capability) -> Check:
    return Check(function, frozenset(needs))


STATIC = (
    _check(declarations),
    _check(unknown_choices_are_refused),
)
"""Checks that take the adapter; no run is started."""

IN_SESSION = (
    _check(training_checks.start_is_equal, STATE),
    _check(training_checks.start_is_of_the_seed, STATE),
    _check(training_checks.dropout_differs, STATE, GRADIENTS),
    _check(training_checks.reseeds_dropout, STATE, GRADIENTS),
    _check(collectives.all_reduce_sum, COMPUTE),
    _check(collectives.all_reduce_mean, COMPUTE),
    _check(collectives.all_reduce_max, COMPUTE),
    _check(collectives.all_gather, COMPUTE),
    _check(collectives.send_receive, COMPUTE, Capability.SEND_RECEIVE),
    _check(collectives.broadcast_within, COMPUTE, Capability.SUBGROUPS),
    _check(collectives.broadcast_keeps_bits, COMPUTE, Capability.SUBGROUPS),
    _check(collectives.inputs_are_left_alone, COMPUTE),
    _check(collectives.barrier),
    _check(collectives.collectives_overlap, COMPUTE),
    _check(training_checks.order),
    _check(training_checks.sizes),
    _check(training_checks.training, STEP, STATE),
    _check(training_checks.training_metrics, STEP, STATE),
    _check(training_checks.moving_statistics, STEP, STATE),
    _check(training_checks.replicas_stay_equal, STEP, STATE, GRADIENTS),
    _check(training_checks.exact_mean_of_gradients, STATE, GRADIENTS),
    _check(training_checks.synchronous_step, STEP, STATE),
    _check(training_checks.steps_leave_no_threads, STEP),
    _check(training_checks.accumulation, STEP, STATE),
    _check(
        training_checks.gradients_and_apply,
        *(STEP, STATE, GRADIENTS, Capability.APPLY_GRADIENTS, COMPUTE),
    ),
    _check(training_checks.local_step, STATE, Capability.LOCAL_STEP),
    _check(training_checks.local_step_without_samples, STATE, Capability.LOCAL_STEP),
    _check(training_checks.local_step_accumulated, STATE, Capability.LOCAL_STEP),
    _check(
        training_checks.average_parameters,
        *(STATE, GRADIENTS, Capability.LOCAL_STEP, Capability.AVERAGE_PARAMETERS),
    ),
    _check(state_checks.state_round_trip, STEP, STATE),
    _check(state_checks.state_kinds, STATE),
    _check(state_checks.state_is_a_copy, STEP, STATE),
    _check(state_checks.unknown_state_is_refused, STATE),
    _check(state_checks.evaluation, STATE),
    _check(state_checks.predictions, STATE, COMPUTE),
    _check(state_checks.evaluation_changes_nothing, STEP, STATE),
    _check(computations.computation, COMPUTE),
    _check(computations.computation_on_state, COMPUTE, STATE),
    _check(computations.computation_collectives, COMPUTE),
    _check(computations.computation_scatters, COMPUTE),
    _check(computations.computation_in_subgroups, COMPUTE, Capability.SUBGROUPS),
    _check(computations.computation_in_bfloat16, COMPUTE, Capability.BFLOAT16_COLLECTIVES),
    _check(state_checks.gradients_preserve_state, STEP, STATE, GRADIENTS),
    _check(state_checks.kept_gradients, STEP, STATE, GRADIENTS),
    _check(objectives.own_batches, STEP, STATE),
)
"""Checks that take a `CheckContext`, all made in one run on every process.

Each finishes all communication before it asserts, so that a failing process does not leave the others
waiting. `dropout_differs` comes before any check with uneven slices, which would make the random streams of
the replicas differ by themselves.
"""


def _lacks_steps(adapter: Adapter) -> str | None:
    return None if adapter.has_step_contexts else "the backend gives objectives no step"


def _lacks_groups(adapter: Adapter) -> str | None:
    has_groups = adapter.has_optimizer_groups
    return None if has_groups else "the backend updates all weights with the same options"


def _lacks_updates(adapter: Adapter) -> str | None:
    has_updates = isinstance(adapter, NamedUpdatesBackend)
    return None if has_updates else "the backend has no named updates (no method start_updates)"


def _lacks_per_replica_state(adapter: Adapter) -> str | None:
    has_state = adapter.has_per_replica_state
    return None if has_state else "the backend has no state that differs between replicas"


def _lacks_sample_draws(adapter: Adapter) -> str | None:
    return None if adapter.draws_per_sample else "random layers of the backend draw per replica"


_NEEDS = frozenset({STEP, STATE})
IN_OWN_SESSION = (
    SessionCheck(
        objectives.objective_step,
        _NEEDS,
        spec=reference_model.spec_with_step,
        absence=_lacks_steps,
    ),
    SessionCheck(
        objectives.optimizer_groups,
        _NEEDS,
        spec=reference_model.spec_with_groups,
        absence=_lacks_groups,
    ),
    SessionCheck(
        objectives.named_updates,
        _NEEDS,
        spec=reference_model.spec_with_updates,
        absence=_lacks_updates,
    ),
    SessionCheck(
        objectives.per_replica_state,
        _NEEDS,
        spec=reference_model.spec_with_per_replica_state,
        absence=_lacks_per_replica_state,
    ),
    SessionCheck(
        random_layers.draws_per_sample,
        frozenset({STATE, GRADIENTS}),
        spec=reference_model.spec_with_sample_draws,
        absence=_lacks_sample_draws,
    ),
    SessionCheck(
        ordered_sums.ordered_sums,
        frozenset({STATE, COMPUTE, Capability.ORDERED_SUMS}),
        spec=reference_model.spec_with_ordered_sums,
    ),
)
"""Checks that take a `CheckContext` of a session with another spec, in the processes of the same run."""


def clean_exit(run: Run) -> None:
    """After its work, every process leaves the run soon and without an error."""
    assert run.failure is None, run.failure
    assert run.exit_seconds < EXIT_SECONDS, (
        f"processes were still there {run.exit_seconds:.1f} s after their work was done"
    )


EXIT = _check(clean_exit)
CRASH_CHECKS = (_check(crash_checks.crash, STEP), _check(crash_checks.hang, STEP))
"""Checks that take the backend and the number of replicas; each starts a run."""

RESUMES = _check(resume_checks.resumes_exactly, STEP, STATE)
"""Check that takes the backend and starts its own runs."""

CHECKS = (*STATIC, *IN_SESSION, *IN_OWN_SESSION, EXIT, RESUMES, *CRASH_CHECKS)
"""All checks of a backend, in the order of a scorecard."""


def check_backend(backend: str, *, replicas: int = 2, with_crash_checks: bool = True) -> Scorecard:
    """Makes every check that a backend's capabilities allow.

    Args:
        backend: Registered backend, `NAME` or `NAME:COLLECTIVE`.
        replicas: Number of replicas, at least 2.
        with_crash_checks: Whether to make the checks with runs of their own too: `resumes_exactly`, `crash`
            and `hang`, which take about 10 s each.

    Raises:
        PlanError: The backend cannot run the checks on this host.
    """
    run = try_run(run_checks, _spec(backend), backend, replicas)
    card = _card(backend, replicas, run)
    if not with_crash_checks:
        return card
    endings = tuple(crash_outcome(check, backend, replicas) for check in CRASH_CHECKS)
    return dataclasses.replace(card, outcomes=(*card.outcomes, resume_outcome(backend), *endings))


def check_in_turn(backends: Sequence[str], *, replicas: int = 2) -> list[Scorecard]:
    """Checks several backends one after the other in one run, without crash and resume checks.

    Args:
        backends: Backends, each `NAME` or `NAME:COLLECTIVE`, whose processes start in the same way.
        replicas: Number of replicas, at least 2.
    """
    work = functools.partial(_run_checks_in_turn, backends=tuple(backends))
    run = try_run(work, _spec(backends[0], timeouts=LONG_TIMEOUTS), backends[0], replicas)
    cards = []
    for index, backend in enumerate(backends):
        notes = {rank: problems[index] for rank, problems in enumerate(run.returned)}
        cards.append(_card(backend, replicas, dataclasses.replace(run, notes=notes)))
    return cards


def _spec(backend: str, **changes: Any) -> dict[str, Any]:
    """Spec of a run in which checks are made."""
    adapter = plugin_manager().backend(split_backend(backend)[0])
    return {**on_device(reference_model.spec(adapter, **changes))}


def _card(backend: str, replicas: int, run: Run) -> Scorecard:
    """Scorecard of a backend after the run that made the checks within a session."""
    plugins, name = plugin_manager(), split_backend(backend)[0]
    spec = ResolvedSpec(load_spec(_spec(backend)), plugins)
    plan = make_plan(spec, backend=backend, replicas=replicas)
    adapter = plugins.backend(name)
    static = [outcome_of(check, adapter) for check in STATIC]
    outcomes = (*static, *run_outcomes(adapter, run, len(plan.processes)))
    return Scorecard("backend", name, backend, replicas, outcomes)


def run_checks(session: Session) -> dict[str, str]:
    """Makes every check that the backend's capabilities allow. The function that each rank runs.

    Returns:
        Problem by check name; an empty text where the check passed. Also saved in the notes of the process.
    """
    context, notes, problems = CheckContext(session), Notes(session), dict[str, str]()
    for check in IN_SESSION:
        if check.needs <= context.supported:
            problems[check.name] = _problem(check, context)
            notes.add(check.name, problems[check.name])
    adapter = plugin_manager().backend(session.plan.backend)
    for check in IN_OWN_SESSION:
        if _obstacle(check, adapter) is None:
            problems[check.name] = _problem_in_own_session(check, session, adapter)
            notes.add(check.name, problems[check.name])
    return problems


def _problem_in_own_session(check: SessionCheck, session: Session, adapter: Adapter) -> str:
    spec = check.spec(adapter)
    try:
        with next_session(session, f"{adapter.name}-{check.name}", spec) as own_session:
            return _problem(check, CheckContext(own_session))
    except Exception:
        return traceback.format_exc()


def _obstacle(check: Check, adapter: Adapter) -> str | None:
    """Reason to skip a check of a backend; None where it applies."""
    obstacle = check.obstacle(adapter.capabilities_for(LAYOUT))
    if obstacle is None and isinstance(check, SessionCheck):
        return check.absence(adapter)
    return obstacle


def _run_checks_in_turn(session: Session, backends: Sequence[str]) -> list[dict[str, str]]:
    problems = [run_checks(session)]
    for backend in backends[1:]:
        with next_session(session, backend, _spec(backend), backend=backend) as session:
            problems.append(run_checks(session))
    return problems


def _problem(check: Check, context: CheckContext) -> str:
    context.file_exchange.all_gather({})
    try:
        check.function(context)
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    return ""


def run_outcomes(adapter: Adapter, run: Run, processes: int) -> Iterator[Outcome]:
    """Outcomes of the checks of one run.

    A check that ends the run early fails, and those after it are skipped.
    """
    ended_in = None
    for check in (*IN_SESSION, *IN_OWN_SESSION):
        obstacle = _obstacle(check, adapter)
        noted = [notes[check.name] for notes in run.notes.values() if check.name in notes]
        if obstacle:
            yield check.skipped(obstacle)
        elif ended_in:
            yield check.skipped(f"the run ended in {ended_in}")
        elif len(noted) < processes:
            ended_in = check.name
            yield check.failed(f"the run ended in it: {run.failure}")
        else:
            yield outcome_of_processes(check, noted)
    yield EXIT.skipped(f"the run ended in {ended_in}") if ended_in else outcome_of(EXIT, run)


def resume_outcome(backend: str) -> Outcome:
    """Makes `RESUMES`, in its own runs."""
    adapter = plugin_manager().backend(split_backend(backend)[0])
    obstacle = RESUMES.obstacle(adapter.capabilities_for(LAYOUT))
    return RESUMES.skipped(obstacle) if obstacle else outcome_of(RESUMES, backend)


def crash_outcome(check: Check, backend: str, replicas: int) -> Outcome:
    """Makes one of `CRASH_CHECKS`, in its own run."""
    adapter = plugin_manager().backend(split_backend(backend)[0])
    obstacle = check.obstacle(adapter.capabilities_for(LAYOUT))
    return check.skipped(obstacle) if obstacle else outcome_of(check, backend, replicas)
