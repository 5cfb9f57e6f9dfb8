"""From a spec, a backend and a number of replicas to everything resolved, with nothing started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.launcher import ChosenLauncher
from isotrain.core.contracts.layout import Layout
from isotrain.core.contracts.placement import Seat
from isotrain.core.contracts.plan import Plan, ProcessPlan, split_backend
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.contracts.usability import Usability
from isotrain.core.data import order
from isotrain.core.errors import BackendUnavailableError, PlanError, UnsupportedError
from isotrain.core.planning.ground import Ground
from isotrain.core.planning.launchable import require_launchable
from isotrain.core.planning.layouts import OnLayout, layout_of
from isotrain.core.planning.starts import resolve_start
from isotrain.core.planning.this_machine import ThisMachine
from isotrain.core.plugins.cast import Cast
from isotrain.core.plugins.host import PluginHost
from isotrain.core.spec.training_spec import TrainingSpec


def make_plan(
    cast: Cast,
    *,
    backend: str,
    replicas: int | None,
    launcher: ChosenLauncher | None = None,
    layout: Layout | None = None,
) -> Plan:
    """Resolves a run on this machine, or on those of its layout.

    Args:
        cast: What to train, and what takes part; its strategy is told of the plan.
        backend: `NAME` or `NAME:COLLECTIVE`.
        replicas: How many; None for one per usable GPU, or one.
        launcher: What will start the processes; None: the local one.
        layout: Where they are, if they have been started.

    Raises:
        PlanError: Spec, backend, strategy and replicas do not fit together.
        BackendUnavailableError: The backend cannot be used here.
    """
    spec, host = cast.with_model, cast.host
    name, requested = split_backend(backend)
    adapter = host.backend(name)
    _require_usable("backend", name, adapter.usability())
    launcher = launcher or ChosenLauncher()
    ground = OnLayout(layout) if layout else _ground(launcher, adapter, host)
    for chosen in spec.loggers:
        _require_usable("logger", chosen.name, host.logger(chosen.name, chosen.options).usability())
    strategy = cast.strategy
    found = ground.devices(spec, adapter, strategy, replicas)
    device, count = found.kind, found.replicas
    _require_capabilities(strategy, adapter)
    options = adapter.check_options(spec, strategy.placement.name)
    remarks = [*found.remarks, *_compiling(spec, strategy, adapter)]
    remarks += adapter.check(spec, options, replicas=count)
    resolved = adapter.resolve_collective(requested, device=device, replicas=count)
    placement = strategy.placement.for_replicas(count)
    mesh = placement.mesh(count)
    collective = placement.collective(adapter, resolved) if mesh.places > 1 else "none"
    if mesh.places > 1 and requested is not None and collective != resolved:
        remarks.append(
            f"{strategy.name}: {placement.name} runs exchange over {collective}, and not by {requested}"
        )
    threads = spec.threads or ground.cores(mesh.places)
    global_batch = spec.resolve_global_batch(count)
    factor = spec.scaling.factor(global_batch)
    plan = Plan(
        run=spec.name,
        backend=name,
        framework=adapter.framework,
        collective=collective,
        strategy=strategy.name,
        strategy_options=spec.strategy.options,
        launcher=ground.engine,
        launcher_options=None if layout else launcher.options,
        device=device,
        replicas=count,
        threads=threads,
        processes=ground.placed(_processes(placement.seats(adapter, count))),
        start=resolve_start(adapter, ground.engine, spec, device),
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


def _ground(launcher: ChosenLauncher, adapter: Adapter, host: PluginHost) -> Ground:
    """Where a launcher will start the processes.

    Raises:
        PlanError: It cannot be used here, or does not start this backend.
    """
    starting = host.launcher(launcher.name, launcher.options)
    _require_usable("launcher", launcher.name, starting.usability())
    require_launchable(starting, adapter)
    allocation = starting.allocation()
    if allocation is None:
        return ThisMachine(launcher.name)
    return OnLayout(layout_of(launcher.name, allocation))


def _require_usable(kind: str, name: str, found: Usability) -> None:
    if not found.usable:
        text = f"{kind} {name!r} cannot be used here: {found.reason}. What to do: {found.hint}."
        if kind == "backend":
            raise BackendUnavailableError(f"{text} `isotrain doctor` examines every backend.")
        raise PlanError(text)


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
