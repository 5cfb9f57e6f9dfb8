"""Rules about backends and the machine, and the planning of targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from isotrain.analysis.check.subject import CheckTarget, Hit, Subject
from isotrain.core.contracts.plan import split_backend
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import BackendUnavailableError, PlanError
from isotrain.core.planning.memory_limit import MemoryLimit, replicas_text
from isotrain.core.planning.planner import make_plan, missing_capabilities
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.quantities import counted
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


def plan_targets(
    cast: ResolvedSpec, backends: Sequence[str], replicas: Sequence[int | None]
) -> list[CheckTarget | Hit]:
    """Plans every pair of backend and number of replicas; a pair that cannot be planned is a hit.

    Raises:
        IsotrainError: A backend, collective or strategy is unknown.
    """
    planned: dict[str, CheckTarget | Hit] = {}
    for backend in backends:
        name, collective = split_backend(backend)
        adapter = cast.plugins.backend(name)
        adapter.collective_or_default(collective)
        for count in replicas:
            try:
                plan = make_plan(cast, backend=backend, replicas=count)
            except PlanError as error:
                label = backend if count is None else f"{backend}@{count}"
                planned[label] = _refused(error, label, cast, backend, count)
            else:
                label = f"{backend}@{plan.replicas}"
                planned[label] = CheckTarget(label, adapter, plan)
    return list(planned.values())


def _refused(
    error: PlanError,
    label: str,
    cast: ResolvedSpec,
    backend: str,
    replicas: int | None,
) -> Hit:
    """Finds the option to blame for a plan's failure by planning without it."""
    name, collective = split_backend(backend)
    code, field = "ISO501", "backend"
    if isinstance(error, BackendUnavailableError):
        code = "ISO401"
    elif _fits_elsewhere(cast, name, replicas):
        code, field = "ISO406", "device"
    elif collective is not None and _fits(cast, name, replicas):
        code = "ISO402"
    return Hit(code, field, str(error), (label,))


def _fits_elsewhere(cast: ResolvedSpec, backend: str, replicas: int | None) -> bool:
    if cast.spec.device != "gpu":
        return False
    any_device = ResolvedSpec(cast.spec.replace(device="auto"), cast.plugins)
    return _fits(any_device, backend, replicas)


def _fits(cast: ResolvedSpec, backend: str, replicas: int | None) -> bool:
    try:
        make_plan(cast, backend=backend, replicas=replicas)
    except PlanError:
        return False
    return True


def devices(subject: Subject) -> Iterator[Hit]:
    """Finds plans with more processes or threads than devices or cores."""
    cores = hardware.cores()
    for target in subject.targets:
        plan, where = target.plan, (target.label,)
        if plan.device != "cpu":
            continue
        gpus = 0 if subject.spec.device == "cpu" else target.adapter.accelerators()
        processes, description = plan.device_mesh.total_size, replicas_text(plan)
        if gpus:
            yield Hit("ISO403", "replicas", f"{description}, {counted(gpus, 'GPU')}", where)
        if processes > cores:
            yield Hit("ISO404", "replicas", f"{description}, {counted(cores, 'core')}", where)
        elif processes * plan.threads > cores:
            words = f"{description} of {counted(plan.threads, 'thread')}, {counted(cores, 'core')}"
            yield Hit("ISO405", "threads", words, where)


def memory(subject: Subject) -> Iterator[Hit]:
    """State that exceeds the memory of the machine or a GPU, and the strategies that would fit."""
    for target in subject.targets:
        probe = subject.probes.get(target.plan.framework)
        limit = (
            None
            if probe is None or probe.model is None
            else MemoryLimit.of(target.plan, probe.model)
        )
        excess = None if limit is None else limit.excess(subject.strategy)
        if limit is None or excess is None:
            continue
        candidates = {
            argument: _notes_if_fitting(target, limit, other, subject.spec)
            for argument, other in subject.memory_saving.items()
        }
        fitting = {argument: notes for argument, notes in candidates.items() if notes is not None}
        advice = (
            f"--strategy {' or '.join(fitting)} would fit" if fitting else "no strategy would fit"
        )
        caveats = [f" ({name}: {'; '.join(caveat)})" for name, caveat in fitting.items() if caveat]
        yield Hit("ISO407", "model", f"{excess}; {advice}{''.join(caveats)}", (target.label,))


def _notes_if_fitting(
    target: CheckTarget, limit: MemoryLimit, strategy: Strategy, spec: TrainingSpec
) -> list[str] | None:
    """The backend's notes if a strategy could replace the target's and would fit; else None."""
    adapter, mesh = target.adapter, limit.mesh(strategy)
    try:
        plan = replace(target.plan, device_mesh=mesh)
        strategy.validate(spec, plan)
        strategy.configure(spec, plan)
        notes = adapter.check_layout(spec, strategy.parallel_layout.name)
    except PlanError:
        return None
    if missing_capabilities(strategy, adapter) or limit.excess(strategy) is not None:
        return None
    if plan.device == "gpu" and mesh.total_size > adapter.accelerators():
        return None
    return notes


def notes(subject: Subject) -> Iterator[Hit]:
    """Notes of backends on fields that they implement in their own way."""
    for target in subject.targets:
        options, count = target.plan.options, target.replicas
        probe = subject.probes.get(target.plan.framework)
        notes = target.adapter.check(subject.spec, options, replicas=count)
        notes += target.adapter.check_layout(subject.spec, target.plan.parallel_layout)
        for note in [*notes, *(probe.notes if probe else ())]:
            yield Hit("ISO503", "backend", note, (target.label,))
