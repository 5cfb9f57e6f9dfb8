"""Rules about backends and the machine, and the targets that can be planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from isotrain.core.check.subject import Hit, Subject, Target
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.state_bytes import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import BackendUnavailableError, PlanError
from isotrain.core.planning.make_plan import make_plan, missing_capabilities
from isotrain.core.plugins.cast import Cast
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


def planned(
    cast: Cast, backends: Sequence[str], replicas: Sequence[int | None]
) -> list[Target | Hit]:
    """Plans every pair of backend and replicas; a pair that is refused is a hit.

    Raises:
        IsotrainError: There is no such backend, collective or strategy.
    """
    found: dict[str, Target | Hit] = {}
    for backend in backends:
        name, collective = split_backend(backend)
        adapter = cast.host.backend(name)
        adapter.known_collective(collective)
        for count in replicas:
            try:
                plan = make_plan(cast, backend=backend, replicas=count)
            except PlanError as error:
                label = backend if count is None else f"{backend}@{count}"
                found[label] = _refused(error, label, cast, backend, count)
            else:
                label = f"{backend}@{plan.replicas}"
                found[label] = Target(label, adapter, plan)
    return list(found.values())


def _refused(
    error: PlanError,
    label: str,
    cast: Cast,
    backend: str,
    replicas: int | None,
) -> Hit:
    """Finds what is to blame by leaving it out."""
    name, collective = split_backend(backend)
    code, field = "ISO501", "backend"
    if isinstance(error, BackendUnavailableError):
        code = "ISO401"
    elif _fits_elsewhere(cast, name, replicas):
        code, field = "ISO406", "device"
    elif collective is not None and _fits(cast, name, replicas):
        code = "ISO402"
    return Hit(code, field, str(error), (label,))


def _fits_elsewhere(cast: Cast, backend: str, replicas: int | None) -> bool:
    if cast.spec.device != "gpu":
        return False
    anywhere = Cast(cast.spec.replace(device="auto"), cast.host)
    return _fits(anywhere, backend, replicas)


def _fits(cast: Cast, backend: str, replicas: int | None) -> bool:
    try:
        make_plan(cast, backend=backend, replicas=replicas)
    except PlanError:
        return False
    return True


def devices(subject: Subject) -> Iterator[Hit]:
    """More processes that compute, or threads of theirs, than there are devices or cores."""
    cores = hardware.cores()
    for target in subject.targets:
        plan, where = target.plan, (target.label,)
        if plan.device != "cpu":
            continue
        gpus = 0 if subject.spec.device == "cpu" else target.adapter.accelerators()
        places, told = plan.mesh.places, _told(plan)
        if gpus:
            yield Hit("ISO403", "replicas", f"{told}, {gpus} GPUs", where)
        if places > cores:
            yield Hit("ISO404", "replicas", f"{told}, {cores} cores", where)
        elif places * plan.threads > cores:
            words = f"{told} of {plan.threads} threads, {cores} cores"
            yield Hit("ISO405", "threads", words, where)


def _told(plan: Plan) -> str:
    """How many compute: replicas, or the stages of these."""
    if plan.mesh.places == plan.replicas:
        return f"{plan.replicas} replicas"
    return f"{plan.mesh.places} stages of {plan.replicas} replicas"


def memory(subject: Subject) -> Iterator[Hit]:
    """Replicas whose state takes more than the machine has, and the strategies with which it would not."""
    most = hardware.memory_bytes()
    for target in subject.targets:
        sight = subject.sights.get(target.plan.framework)
        if sight is None or sight.model is None or target.plan.device != "cpu":
            continue
        taken = _taken(subject.strategy, sight.model, target)
        if taken > most:
            fitting = [
                given
                for given, strategy in subject.sparing.items()
                if _runs(strategy, subject.spec, target)
                and _taken(strategy, sight.model, target) <= most
            ]
            advice = (
                f"--strategy {' or '.join(fitting)} would fit"
                if fitting
                else "no strategy would fit"
            )
            words = (
                f"{target.replicas} replicas take {taken / 2**30:.3g} GiB, and this machine has"
                f" {most / 2**30:.3g}; {advice}"
            )
            yield Hit("ISO407", "model", words, (target.label,))


def _runs(strategy: Strategy, spec: TrainingSpec, target: Target) -> bool:
    """Whether a strategy would be planned in the place of the target's own."""
    placement = strategy.placement.for_replicas(target.replicas)
    try:
        mesh = placement.mesh_on(target.replicas, target.plan.hosts)
        strategy.planned(spec, replace(target.plan, mesh=mesh))
        target.adapter.check_placed(spec, strategy.placement.name)
    except PlanError:
        return False
    return not missing_capabilities(strategy, target.adapter)


def _taken(strategy: Strategy, model: ModelBytes, target: Target) -> int:
    places = strategy.placement.mesh(target.replicas).places
    return places * strategy.state_bytes(model, target.replicas).total


def remarks(subject: Subject) -> Iterator[Hit]:
    """What backends honour in their own way."""
    for target in subject.targets:
        options, count = target.plan.options, target.replicas
        sight = subject.sights.get(target.plan.framework)
        remarks = target.adapter.check(subject.spec, options, replicas=count)
        remarks += target.adapter.check_placed(subject.spec, target.plan.placement)
        for remark in [*remarks, *(sight.remarks if sight else ())]:
            yield Hit("ISO503", "backend", remark, (target.label,))
