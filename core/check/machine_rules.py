"""Rules about backends and the machine, and the targets that can be planned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from isotrain.core.check.subject import Hit, Subject, Target
from isotrain.core.contracts.mesh import Mesh
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


@dataclass(frozen=True)
class Room:
    """What state has to fit into: this machine, or each of its GPUs.

    Attributes:
        target: The run.
        model: Whose state it is.
        most: Bytes that there are.
    """

    target: Target
    model: ModelBytes
    most: int

    @classmethod
    def of(cls, target: Target, model: ModelBytes) -> Room | None:
        """That of a run; None where nobody tells how large it is."""
        if target.plan.device == "cpu":
            return cls(target, model, hardware.memory_bytes())
        most = hardware.gpu_memory_bytes()
        return None if most is None else cls(target, model, most)

    @property
    def _is_gpu(self) -> bool:
        return self.target.plan.device != "cpu"

    def taken(self, strategy: Strategy) -> int:
        """By the state of a place on a GPU of its own, or of all places of the host that has most."""
        plan = self.target.plan
        own = strategy.state_bytes(self.model, plan.replicas).total
        if self._is_gpu:
            return own
        most = max(map(len, plan.hosts)) / plan.replicas
        return own * math.ceil(self._mesh(strategy).places * most)

    def _mesh(self, strategy: Strategy) -> Mesh:
        plan = self.target.plan
        return strategy.placement.for_replicas(plan.replicas).mesh_on(plan.replicas, plan.hosts)

    def holds(self, strategy: Strategy, spec: TrainingSpec) -> list[str] | None:
        """The backend's remarks if a strategy runs in the place of the target's own, and fits; else None."""
        target = self.target
        adapter = target.adapter
        try:
            mesh = self._mesh(strategy)
            strategy.planned(spec, replace(target.plan, mesh=mesh))
            remarks = adapter.check_placed(spec, strategy.placement.name)
        except PlanError:
            return None
        if missing_capabilities(strategy, adapter) or self.taken(strategy) > self.most:
            return None
        if self._is_gpu and mesh.places > adapter.accelerators():
            return None
        return remarks

    def words(self, taken: int) -> str:
        """That more is taken than there is."""
        gibs, most = f"{taken / 2**30:.3g} GiB", f"{self.most / 2**30:.3g}"
        if self._is_gpu:
            return f"each GPU would have to hold {gibs}, and has {most}"
        return f"{_told(self.target.plan)} take {gibs}, and this machine has {most}"


def memory(subject: Subject) -> Iterator[Hit]:
    """State that takes more than the machine or a GPU has, and the strategies with which it would not."""
    for target in subject.targets:
        sight = subject.sights.get(target.plan.framework)
        room = None if sight is None or sight.model is None else Room.of(target, sight.model)
        if room is None or (taken := room.taken(subject.strategy)) <= room.most:
            continue
        found = {given: room.holds(other, subject.spec) for given, other in subject.sparing.items()}
        fitting = {given: remarks for given, remarks in found.items() if remarks is not None}
        advice = (
            f"--strategy {' or '.join(fitting)} would fit" if fitting else "no strategy would fit"
        )
        caveats = [f" ({given}: {'; '.join(told)})" for given, told in fitting.items() if told]
        words = f"{room.words(taken)}; {advice}{''.join(caveats)}"
        yield Hit("ISO407", "model", words, (target.label,))


def remarks(subject: Subject) -> Iterator[Hit]:
    """What backends honour in their own way."""
    for target in subject.targets:
        options, count = target.plan.options, target.replicas
        sight = subject.sights.get(target.plan.framework)
        remarks = target.adapter.check(subject.spec, options, replicas=count)
        remarks += target.adapter.check_placed(subject.spec, target.plan.placement)
        for remark in [*remarks, *(sight.remarks if sight else ())]:
            yield Hit("ISO503", "backend", remark, (target.label,))
