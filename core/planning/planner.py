"""From a spec, a backend and a number of replicas to everything resolved, with nothing started."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.capabilities import Availability, Capability
from isotrain.core.contracts.cluster_environment import ClusterLayout
from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.contracts.parallel_layout import ProcessRole
from isotrain.core.contracts.plan import Plan, ProcessPlan, replicas_by_host, split_backend
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.data import sampler
from isotrain.core.errors import (
    BackendUnavailableError,
    PlanError,
    UnsupportedError,
    did_you_mean,
)
from isotrain.core.planning.cluster_resources import ClusterResources, layout_of
from isotrain.core.planning.launcher_support import require_launchable, why_not_from_here
from isotrain.core.planning.local_resources import LocalResources
from isotrain.core.planning.resources import Devices, Resources
from isotrain.core.planning.start_method import resolve_start_method
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.training_spec import TrainingSpec


def make_plan(
    cast: ResolvedSpec,
    *,
    backend: str,
    replicas: int | None,
    launcher: LauncherChoice | None = None,
    layout: ClusterLayout | None = None,
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
    spec, host = cast.spec_with_model, cast.host
    name, collective = split_backend(backend)
    adapter = host.backend(name)
    _require_usable("backend", name, adapter.availability())
    ground, cannot = (ClusterResources(layout), []) if layout else _ground(launcher, adapter, host)
    for chosen in spec.loggers:
        _require_usable(
            "logger", chosen.name, host.logger(chosen.name, chosen.options).availability()
        )
    if replicas is not None and replicas < 1:
        raise PlanError(f"replicas: expected at least 1, received {replicas}.")
    devices = ground.devices(spec, adapter, cast.strategy, replicas)
    _require_capabilities(cast.strategy, adapter)
    plan = _resolved(cast, adapter, ground, devices, collective)
    return replace(plan, notes=(*cannot, *plan.notes, *cast.strategy.configure(spec, plan)))


def _resolved(
    cast: ResolvedSpec, adapter: Adapter, ground: Resources, devices: Devices, requested: str | None
) -> Plan:
    """The plan, but for what the strategy has to say of it.

    Args:
        cast: What to train, and what takes part.
        adapter: Of the backend.
        ground: Where the processes will be.
        devices: What the replicas compute on.
        requested: The collective that was asked for, if one was.
    """
    spec, strategy, count = cast.spec_with_model, cast.strategy, devices.replicas
    _require_framework(spec, adapter.framework)
    options = adapter.check_options(spec, strategy.parallel_layout.name)
    _require_exchange(options, strategy, adapter)
    notes = [*devices.notes, *_compiling(spec, strategy, adapter)]
    notes += _options_of_nobody(spec, cast.host.backends.names())
    notes += adapter.check(spec, options, replicas=count)
    resolved = adapter.resolve_collective(requested, device=devices.kind, replicas=count)
    layout_notes = adapter.check_layout(spec, strategy.parallel_layout.name)
    parallel_layout = strategy.parallel_layout.for_replicas(count)
    notes += layout_notes if parallel_layout.name == strategy.parallel_layout.name else []
    processes = ground.assign_hosts(_processes(parallel_layout.process_roles(adapter, count)))
    mesh = parallel_layout.device_mesh_on_hosts(count, replicas_by_host(processes))
    collective = parallel_layout.collective(adapter, resolved) if mesh.total_size > 1 else "none"
    if mesh.total_size > 1 and requested is not None and collective != resolved:
        notes.append(
            f"{strategy.name}: {parallel_layout.name} runs exchange over {collective}, and not by {requested}"
        )
    threads = spec.threads or ground.cores(mesh.total_size)
    return Plan(
        **_of_spec(spec, count),
        backend=adapter.name,
        framework=adapter.framework,
        collective=collective,
        strategy=strategy.name,
        launcher=ground.launcher,
        launcher_options=ground.options,
        device=devices.kind,
        replicas=count,
        threads=threads,
        processes=processes,
        start_method=resolve_start_method(adapter, ground.launcher, spec, devices.kind),
        environment_variables=adapter.environment_variables(
            device=devices.kind, threads=threads, replicas=count
        ),
        options=options,
        notes=tuple(notes),
        parallel_layout=parallel_layout.name,
        device_mesh=mesh,
        extra_ports=parallel_layout.extra_ports,
        requested_collective=requested,
    )


def _of_spec(spec: TrainingSpec, replicas: int) -> dict[str, Any]:
    """The fields of a plan that hang on the spec and the number of replicas alone."""
    global_batch_size = spec.resolve_global_batch_size(replicas)
    factor = spec.scaling.factor(global_batch_size)
    return {
        "run": spec.name,
        "strategy_options": spec.strategy.options,
        "precision": spec.precision,
        "global_batch_size": global_batch_size,
        "local_batch_sizes": _local_batch_sizes(global_batch_size, replicas),
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
        "scaling": f"{spec.scaling.rule} (x {factor:g})",
        "optimizer": spec.optimizer.name,
        "learning_rate": spec.optimizer.lr * factor,
        "timeouts": spec.timeouts.model_dump(),
        "loggers": tuple(chosen.name for chosen in spec.loggers),
    }


def _ground(
    launcher: LauncherChoice | None, adapter: Adapter, host: PluginManager
) -> tuple[Resources, list[str]]:
    """Where a launcher will start the processes; and that it cannot do so from here, where that is so.

    Raises:
        PlanError: It does not start this backend, or there is nothing that it could start it on.
    """
    chosen = launcher or LauncherChoice()
    starting = host.launcher(chosen.name, chosen.options)
    cannot = why_not_from_here(starting)
    allocation = starting.allocation()
    require_launchable(starting, adapter, 1 if allocation is None else allocation.slots)
    if allocation is None:
        return LocalResources(chosen), cannot
    return ClusterResources(layout_of(chosen.name, allocation), chosen.options), cannot


def _require_usable(kind: str, name: str, found: Availability) -> None:
    if not found.available:
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
    """Says why the backend lacks what the strategy requires of groups of its parallel_layout."""
    parallel_layout = strategy.parallel_layout
    found = adapter.capabilities_for(parallel_layout.name).missing(strategy.requires)
    return [f"{parallel_layout.message_prefix}it has {missing}" for missing in found]


def _require_exchange(options: Collection[str], strategy: Strategy, adapter: Adapter) -> None:
    """Refuses options about an exchange of gradients that no step of the strategy has.

    Raises:
        UnsupportedError: There is such an option.
    """
    if Capability.SYNCHRONOUS_STEP in strategy.requires:
        return
    for option in adapter.replicated_options.intersection(options):
        raise UnsupportedError(
            f"backend_options.{adapter.name}.{option}: it is about how the gradients of data-parallel steps"
            f" are exchanged, of which strategy {strategy.name!r} has none. Leave it out."
        )


def _require_framework(spec: TrainingSpec, framework: str) -> None:
    """Looks whether a framework has a model, and a loss or objective.

    Raises:
        SpecError: One of them is a table that has no entry for it.
    """
    for field_name in ("model", "objective"):
        spec.for_framework(field_name, framework)
    spec.losses(framework)


def _options_of_nobody(spec: TrainingSpec, backends: Sequence[str]) -> list[str]:
    """Says which options nobody takes: of a name that is written wrongly, or of a plugin that is not here."""
    return [
        f"backend_options.{name}: no backend of that name is known here, so nobody takes these options."
        f"{did_you_mean(name, backends)}"
        for name in spec.backend_options
        if name not in backends
    ]


def _compiling(spec: TrainingSpec, strategy: Strategy, adapter: Adapter) -> list[str]:
    """What a plan says of `compile`.

    Raises:
        UnsupportedError: Nothing compiles the model.
    """
    if not spec.compile:
        return []
    if adapter.compiler is None:
        raise UnsupportedError(f"compile: backend {adapter.name!r} has no compiler. Leave it out.")
    if strategy.parallel_layout.name != "replicated":
        raise UnsupportedError(
            f"compile: the model is not compiled in {strategy.parallel_layout.name} runs, such"
            f" as {strategy.name!r}"
            " has. Leave it out."
        )
    return [
        f"compile: {adapter.compiler} translates the model; bits are not those of a run without"
    ]


def _processes(seats: Sequence[ProcessRole]) -> tuple[ProcessPlan, ...]:
    return tuple(
        ProcessPlan(rank, LOCALHOST, rank, seat.replicas, seat.role)
        for rank, seat in enumerate(seats)
    )


def _local_batch_sizes(global_batch_size: int, replicas: int) -> tuple[int, ...]:
    bounds = (
        sampler.slice_bounds(global_batch_size, replicas, replica) for replica in range(replicas)
    )
    return tuple(stop - start for start, stop in bounds)
