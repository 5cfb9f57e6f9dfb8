"""Rules about backends and the machine, and the planning of targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from isotrain.analysis.check.subject import CheckTarget, Hit, Subject
from isotrain.core.contracts.device_mesh import DeviceMesh
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import BackendUnavailableError, PlanError
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
        processes, description = plan.device_mesh.total_size, _told(plan)
        if gpus:
            yield Hit("ISO403", "replicas", f"{description}, {counted(gpus, 'GPU')}", where)
        if processes > cores:
            yield Hit("ISO404", "replicas", f"{description}, {counted(cores, 'core')}", where)
        elif processes * plan.threads > cores:
            words = f"{description} of {counted(plan.threads, 'thread')}, {counted(cores, 'core')}"
            yield Hit("ISO405", "threads", words, where)


def _told(plan: Plan) -> str:
    """The number of replicas, or of processes and replicas, as text."""
    if plan.device_mesh.total_size == plan.replicas:
        return counted(plan.replicas, "replica")
    return f"{plan.device_mesh.total_size} processes of {plan.replicas} replicas"


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that the training state must fit into: this machine's, or that of each GPU.

    Attributes:
        target: Target whose state must fit.
        model: Size of the model's state in bytes.
        limit_bytes: Available memory in bytes.
    """

    target: CheckTarget
    model: ModelBytes
    limit_bytes: int

    @classmethod
    def of(cls, target: CheckTarget, model: ModelBytes) -> MemoryLimit | None:
        """The memory limit of a target; None if the memory of its GPUs is unknown."""
        if target.plan.device == "cpu":
            return cls(target, model, hardware.memory_bytes())
        gpu_bytes = hardware.gpu_memory_bytes()
        return None if gpu_bytes is None else cls(target, model, gpu_bytes)

    @property
    def _is_gpu(self) -> bool:
        return self.target.plan.device != "cpu"

    def bytes_needed(self, strategy: Strategy) -> int:
        """Bytes of state on one GPU, or on CPUs of all processes of the host that has most."""
        plan = self.target.plan
        per_process = strategy.state_bytes(self.model, plan.replicas).total
        if self._is_gpu:
            return per_process
        most = max(map(len, plan.hosts)) / plan.replicas
        return per_process * math.ceil(self._mesh(strategy).total_size * most)

    def _mesh(self, strategy: Strategy) -> DeviceMesh:
        plan = self.target.plan
        return strategy.parallel_layout.for_replicas(plan.replicas).device_mesh_on_hosts(
            plan.replicas, plan.hosts
        )

    def notes_if_fitting(self, strategy: Strategy, spec: TrainingSpec) -> list[str] | None:
        """The backend's notes if a strategy could replace the target's and would fit; else None."""
        target = self.target
        adapter = target.adapter
        try:
            mesh = self._mesh(strategy)
            plan = replace(target.plan, device_mesh=mesh)
            strategy.validate(spec, plan)
            strategy.configure(spec, plan)
            notes = adapter.check_layout(spec, strategy.parallel_layout.name)
        except PlanError:
            return None
        if (
            missing_capabilities(strategy, adapter)
            or self.bytes_needed(strategy) > self.limit_bytes
        ):
            return None
        if self._is_gpu and mesh.total_size > adapter.accelerators():
            return None
        return notes

    def message(self, taken: int) -> str:
        """The message that the state, of `taken` bytes, needs more memory than there is."""
        gibs, most = f"{taken / 2**30:.3g} GiB", f"{self.limit_bytes / 2**30:.3g}"
        if self._is_gpu:
            return f"each GPU would have to hold {gibs}, and has {most}"
        return f"{_told(self.target.plan)} take {gibs}, and this machine has {most}"


def memory(subject: Subject) -> Iterator[Hit]:
    """State that exceeds the memory of the machine or a GPU, and the strategies that would fit."""
    for target in subject.targets:
        probe = subject.probes.get(target.plan.framework)
        memory_limit = (
            None if probe is None or probe.model is None else MemoryLimit.of(target, probe.model)
        )
        if (
            memory_limit is None
            or (taken := memory_limit.bytes_needed(subject.strategy)) <= memory_limit.limit_bytes
        ):
            continue
        candidates = {
            argument: memory_limit.notes_if_fitting(other, subject.spec)
            for argument, other in subject.memory_saving.items()
        }
        fitting = {argument: notes for argument, notes in candidates.items() if notes is not None}
        advice = (
            f"--strategy {' or '.join(fitting)} would fit" if fitting else "no strategy would fit"
        )
        caveats = [f" ({name}: {'; '.join(caveat)})" for name, caveat in fitting.items() if caveat]
        words = f"{memory_limit.message(taken)}; {advice}{''.join(caveats)}"
        yield Hit("ISO407", "model", words, (target.label,))


def notes(subject: Subject) -> Iterator[Hit]:
    """Notes of backends on fields that they implement in their own way."""
    for target in subject.targets:
        options, count = target.plan.options, target.replicas
        probe = subject.probes.get(target.plan.framework)
        notes = target.adapter.check(subject.spec, options, replicas=count)
        notes += target.adapter.check_layout(subject.spec, target.plan.parallel_layout)
        for note in [*notes, *(probe.notes if probe else ())]:
            yield Hit("ISO503", "backend", note, (target.label,))
