"""From a spec, a backend and a number of replicas to everything resolved, with nothing started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.launcher import ChosenLauncher
from isotrain.core.contracts.layout import Layout
from isotrain.core.contracts.mesh import STAGE
from isotrain.core.contracts.placement import Seat
from isotrain.core.contracts.plan import DeviceKind, Plan, ProcessPlan, split_backend
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.contracts.start import Start
from isotrain.core.contracts.state_bytes import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.contracts.usability import Usability
from isotrain.core.data import order
from isotrain.core.errors import BackendUnavailableError, PlanError, UnsupportedError
from isotrain.core.planning.launchable import require_launchable
from isotrain.core.planning.layouts import devices_for, layout_of, placed, replicas_for
from isotrain.core.planning.starts import resolve_start
from isotrain.core.plugins.host import PluginHost
from isotrain.core.plugins.named_model import with_named_model
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


def make_plan(
    spec: TrainingSpec,
    *,
    backend: str,
    replicas: int | None,
    host: PluginHost,
    launcher: ChosenLauncher | None = None,
    layout: Layout | None = None,
) -> Plan:
    """Resolves a run on this machine, or on those of its layout.

    Args:
        spec: What to train.
        backend: `NAME` or `NAME:COLLECTIVE`.
        replicas: How many; None for one per usable GPU, or one.
        host: Knows the backends, strategies, launchers, models and loggers.
        launcher: What will start the processes; None: the local one.
        layout: Where they are, if they have been started.

    Raises:
        PlanError: Spec, backend, strategy and replicas do not fit together.
        BackendUnavailableError: The backend cannot be used here.
    """
    name, requested = split_backend(backend)
    adapter = host.backend(name)
    _require_usable("backend", name, adapter.usability())
    launcher = launcher or ChosenLauncher()
    launcher_options = None if layout else launcher.options
    if layout is None:
        layout = _allocated(launcher, adapter, host)
    for chosen in spec.loggers:
        _require_usable("logger", chosen.name, host.logger(chosen.name, chosen.options).usability())
    with_named_model(spec, host)
    strategy = host.strategy(spec.strategy.name, spec.strategy.options)
    stages = strategy.placement.mesh(1).size(STAGE)
    if layout is None:
        device, count, device_remarks = _devices(spec, adapter, replicas, stages)
    else:
        count = replicas_for(layout, adapter, strategy, replicas)
        device, device_remarks = devices_for(layout, adapter, spec)
    _require_capabilities(strategy, adapter)
    options = adapter.check_options(spec)
    remarks = [*device_remarks, *_compiling(spec, strategy, adapter)]
    remarks += adapter.check(spec, options, replicas=count)
    resolved = adapter.resolve_collective(requested, device=device, replicas=count)
    placement = strategy.placement.for_replicas(count)
    mesh = placement.mesh(count)
    collective = placement.collective(adapter, resolved) if mesh.places > 1 else "none"
    if mesh.places > 1 and requested is not None and collective != resolved:
        remarks.append(
            f"{strategy.name}: {placement.name} runs exchange over {collective}, and not by {requested}"
        )
    processes = _processes(placement.seats(adapter, count))
    threads = spec.threads or max(1, hardware.cores() // mesh.places)
    started_by = launcher.name
    start = resolve_start(adapter, started_by, spec, device)
    if layout is not None:
        started_by, processes = layout.engine, placed(processes, layout)
        threads = spec.threads or layout.cores
        start = Start(why_fresh=f"{started_by} starts each process by itself")
    global_batch = spec.resolve_global_batch(count)
    factor = spec.scaling.factor(global_batch)
    plan = Plan(
        run=spec.name,
        backend=name,
        framework=adapter.framework,
        collective=collective,
        strategy=strategy.name,
        strategy_options=spec.strategy.options,
        launcher=started_by,
        launcher_options=launcher_options,
        device=device,
        replicas=count,
        threads=threads,
        processes=processes,
        start=start,
        environment=adapter.environment(device=device, threads=threads, replicas=count),
        precision=spec.precision,
        global_batch=global_batch,
        local_batches=_local_batches(global_batch, count),
        accumulate=spec.accumulate,
        scaling=f"{spec.scaling.rule} (x {factor:g})",
        learning_rate=spec.optimizer.lr * factor,
        timeouts=spec.timeouts.model_dump(),
        options=options,
        loggers=tuple(chosen.name for chosen in spec.loggers),
        placement=placement.name,
        mesh=mesh,
        doors=placement.doors,
    )
    remarks += strategy.planned(spec, plan)
    return replace(plan, remarks=tuple(remarks))


def _allocated(launcher: ChosenLauncher, adapter: Adapter, host: PluginHost) -> Layout | None:
    """Where the processes will be; None: on this machine.

    Raises:
        PlanError: The launcher cannot be used here, or does not start this backend.
    """
    starting = host.launcher(launcher.name, launcher.options)
    _require_usable("launcher", launcher.name, starting.usability())
    require_launchable(starting, adapter)
    allocation = starting.allocation()
    return None if allocation is None else layout_of(launcher.name, allocation)


def _require_usable(kind: str, name: str, found: Usability) -> None:
    if not found.usable:
        text = f"{kind} {name!r} cannot be used here: {found.reason}. What to do: {found.hint}."
        if kind == "backend":
            raise BackendUnavailableError(f"{text} `isotrain doctor` examines every backend.")
        raise PlanError(text)


def _devices(
    spec: TrainingSpec, adapter: Adapter, replicas: int | None, stages: int
) -> tuple[DeviceKind, int, list[str]]:
    """Chooses CPUs or GPUs, and how many replicas, each of which takes one for each of its stages."""
    if replicas is not None and replicas < 1:
        raise PlanError(f"replicas: expected at least 1, received {replicas}.")
    gpus = 0 if spec.device == "cpu" else adapter.accelerators()
    count = replicas or max(1, gpus // stages)
    if gpus >= count * stages:
        return "gpu", count, []
    if spec.device == "gpu":
        raise PlanError(
            f"device: gpu was asked for with {_asked(count, stages)}, and {adapter.name!r} can use {gpus}"
            " GPUs here. Use fewer replicas, or device: cpu."
        )
    if gpus:
        return "cpu", count, [f"{gpus} GPUs for {_asked(count, stages)} are too few: CPUs are used"]
    return "cpu", count, []


def _asked(replicas: int, stages: int) -> str:
    return f"{replicas} replicas" if stages == 1 else f"{replicas} replicas of {stages} stages"


def _require_capabilities(strategy: Strategy, adapter: Adapter) -> None:
    reasons = missing_capabilities(strategy, adapter)
    if reasons:
        raise UnsupportedError(
            f"strategy {strategy.name!r} does not run on backend {adapter.name!r}: "
            + "; ".join(reasons)
            + ". `isotrain strategies` lists every pair."
        )


def missing_capabilities(strategy: Strategy | type[Strategy], adapter: Adapter) -> list[str]:
    """Says why the backend lacks what the strategy requires of groups of its placement."""
    placement = strategy.placement
    found = adapter.can(placement.name).missing(strategy.requires)
    return [f"{placement.where}it has {missing}" for missing in found]


def _compiling(spec: TrainingSpec, strategy: Strategy, adapter: Adapter) -> list[str]:
    """What a plan says of `compile`.

    Raises:
        UnsupportedError: Nothing compiles the model.
    """
    if not spec.compile:
        return []
    if adapter.compiler is None:
        raise UnsupportedError(f"compile: backend {adapter.name!r} has no compiler. Leave it out.")
    if strategy.placement.name != "replicated":
        raise UnsupportedError(
            f"compile: the model is not compiled in {strategy.placement.name} runs, such as {strategy.name!r}"
            " has. Leave it out."
        )
    return [
        f"compile: {adapter.compiler} translates the model; bits are not those of a run without"
    ]


def _processes(seats: Sequence[Seat]) -> tuple[ProcessPlan, ...]:
    return tuple(
        ProcessPlan(rank, LOCALHOST, rank, seat.replicas, seat.role)
        for rank, seat in enumerate(seats)
    )


def _local_batches(global_batch: int, replicas: int) -> tuple[int, ...]:
    bounds = (order.slice_bounds(global_batch, replicas, replica) for replica in range(replicas))
    return tuple(stop - start for start, stop in bounds)


@dataclass(frozen=True)
class Measured:
    """What only the data and the built model can tell.

    Attributes:
        samples: In the training data; None for a stream.
        parameters: Trainable numbers in the model.
        gradient_bytes: Bytes of all gradients of one replica.
        weight_shapes: Of the trainable weights, in order.
        remarks: On the model and the loss.
        model: What its state takes.
    """

    samples: int | None
    parameters: int
    gradient_bytes: int
    weight_shapes: Sequence[Sequence[int]]
    remarks: Sequence[str] = ()
    model: ModelBytes | None = None


def with_measures(
    plan: Plan, spec: TrainingSpec, found: Measured, *, strategy: Strategy, adapter: Adapter
) -> Plan:
    """Completes a plan with what was measured.

    Args:
        plan: Without it.
        spec: What the plan was made from.
        found: What was measured.
        strategy: Of the plan; it is told of the completed plan, so that it can start.
        adapter: Of the plan's backend.
    """
    per_epoch = None
    total = spec.steps
    if found.samples is not None:
        per_epoch = order.steps_per_epoch(found.samples, plan.global_batch, spec.drop_remainder)
        total = spec.steps or (spec.epochs or 0) * per_epoch
    plan = replace(
        plan,
        samples=found.samples,
        steps_per_epoch=per_epoch,
        total_steps=total,
        parameters=found.parameters,
        gradient_bytes=found.gradient_bytes,
        weight_shapes=tuple(map(tuple, found.weight_shapes)),
        remarks=(*plan.remarks, *found.remarks),
    )
    strategy.planned(spec, plan)
    exchanged: float | None = 0.0
    if plan.replicas > 1:
        exchanged = strategy.exchanged_bytes(found.gradient_bytes, plan.replicas)
        if exchanged is None:
            exchanged = adapter.exchanged_bytes(plan)
    kept = None if found.model is None else strategy.state_bytes(found.model, plan.replicas)
    return replace(plan, exchanged_bytes_per_step=exchanged, state_bytes=kept)
