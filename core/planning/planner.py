"""Resolves a spec, a backend and a number of replicas into the plan of a run; starts nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.adapter_protocols import NamedUpdatesBackend
from isotrain.core.contracts.backend.capabilities import Availability, Capability
from isotrain.core.contracts.backend.step_context import called_collectives, takes_step
from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import (
    DeviceKind,
    Plan,
    StartMethod,
    replicas_by_host,
    split_backend,
)
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.strategy import Strategy, require_backend_step
from isotrain.core.data import sampler
from isotrain.core.errors import (
    BackendUnavailableError,
    PlanError,
    UnsupportedError,
    did_you_mean,
    unknown_name,
)
from isotrain.core.planning.backend_choice import resolve_backend
from isotrain.core.planning.cluster_resources import ClusterResources, layout_of
from isotrain.core.planning.launcher_support import require_launchable, why_not_from_here
from isotrain.core.planning.resources import Devices, LocalResources, Resources
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.quantities import counted
from isotrain.core.spec.import_strings import is_bare_name
from isotrain.core.spec.schedules import OneCycleSchedule
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.process import fork_obstacle

START_VARIABLE = "ISOTRAIN_START"
_START_METHODS = ("forked", "fresh")


def make_plan(
    resolved_spec: ResolvedSpec,
    *,
    backend: str | None,
    replicas: int | None,
    launcher: LauncherChoice | None = None,
    resources: Resources | None = None,
) -> Plan:
    """Resolves a run on this machine, or on the hosts of a cluster.

    Args:
        resolved_spec: Spec with its plugins; its strategy validates the plan.
        backend: `NAME`, `NAME:COLLECTIVE` or `auto`; None: the spec's, or `auto`.
        replicas: Number of replicas; None: one per usable GPU, or one.
        launcher: Launcher that will start the processes; None: the local one.
        resources: Resources of processes that no launcher of ours starts; None: those of the launcher.

    Raises:
        PlanError: Spec, backend, strategy and replicas do not fit together.
        BackendUnavailableError: The backend is not available here.
    """
    spec, host = resolved_spec.spec_with_model, resolved_spec.plugins
    chosen = resolve_backend(backend, resolved_spec)
    name, collective = split_backend(chosen)
    adapter = host.backend(name)
    _require_available("backend", name, adapter.availability())
    if replicas is not None and replicas < 1:
        raise PlanError(f"replicas: expected at least 1, received {replicas}.")
    _require_capabilities(resolved_spec.strategy, adapter)
    resources, launcher_notes = (
        (resources, [])
        if resources
        else _resources(launcher, adapter, resolved_spec.strategy, replicas, host)
    )
    for choice in spec.loggers:
        logger = host.logger(choice.name, choice.options)
        _require_available("logger", choice.name, logger.availability())
    for callback in filter(is_bare_name, spec.callbacks):
        host.callback(callback)
    devices = resources.devices(spec, adapter, resolved_spec.strategy, replicas, collective)
    plan = _resolve(resolved_spec, adapter, resources, devices, collective)
    is_named = chosen in (backend, spec.backend)
    choice_notes = [] if is_named else ["backend: the first that is available here"]
    return replace(
        plan,
        notes=tuple(
            dict.fromkeys(
                (
                    *choice_notes,
                    *launcher_notes,
                    *plan.notes,
                    *resolved_spec.strategy.validate(spec, plan),
                    *_preference_notes(resolved_spec.strategy, adapter, plan),
                )
            )
        ),
    )


def _resolve(
    resolved_spec: ResolvedSpec,
    adapter: Adapter,
    resources: Resources,
    devices: Devices,
    requested: str | None,
) -> Plan:
    """The plan without the notes of the strategy.

    Args:
        resolved_spec: Spec with its plugins.
        adapter: Adapter of the backend.
        resources: Hosts and cores of the processes.
        devices: Devices of the replicas.
        requested: Requested collective; None: the backend's default.
    """
    spec, strategy, count = resolved_spec.spec_with_model, resolved_spec.strategy, devices.replicas
    _require_framework(spec, adapter.framework)
    _require_step_contexts(spec, strategy, adapter)
    most = max(count, spec.elastic.max or 0) if spec.elastic else count
    _require_equal_statistics(spec, strategy, adapter, most)
    _require_sample_draws(spec, strategy, adapter)
    notes_on_updates = _updates_notes(spec, strategy, adapter)
    options = adapter.check_options(spec, strategy.parallel_layout.name)
    _require_exchange_options_used(options, strategy, adapter)
    for each in spec.update_specs.values():
        _require_optimizer_groups(each, adapter, strategy)
        _require_momentum(each, strategy)
    if spec.gradients is not None:
        require_backend_step(strategy, "gradients")
    if spec.on_nan == "skip":
        require_backend_step(strategy, "on_nan: skip")
    _require_ordered_sums(spec, strategy, adapter, devices.kind, most)
    notes_on_elastic = _elastic_notes(resolved_spec, adapter, resources, devices)
    notes = [*devices.notes, *notes_on_updates, *notes_on_elastic]
    notes += _compile_notes(spec, strategy, adapter)
    _require_gradient_norm(spec, strategy, most)
    notes += _average_notes(spec, strategy, most)
    notes += _per_replica_notes(spec, strategy, adapter)
    notes += _reproducible_notes(spec)
    warnings = [
        *devices.warnings,
        *_idle_replica_warnings(spec, count),
        *_unused_options_warnings(spec, resolved_spec.plugins.backends.names()),
    ]
    for each in spec.update_specs.values():
        notes += adapter.check(each, options, replicas=count)
    resolved = adapter.resolve_collective(requested, device=devices.kind, replicas=count)
    layout_notes = adapter.check_layout(spec, strategy.parallel_layout.name)
    parallel_layout = strategy.parallel_layout.for_replicas(count)
    notes += layout_notes if parallel_layout.name == strategy.parallel_layout.name else []
    processes = resources.assign_hosts(parallel_layout.processes(adapter, count))
    mesh = parallel_layout.device_mesh_on_hosts(count, replicas_by_host(processes))
    collective = parallel_layout.collective(adapter, resolved) if mesh.total_size > 1 else "none"
    if mesh.total_size > 1 and requested is not None and collective != resolved:
        notes.append(
            f"{strategy.name}: {parallel_layout.name} runs communicate over {collective}, not {requested}"
        )
    threads = spec.threads or (1 if spec.reproducible else resources.cores(mesh.total_size))
    return Plan(
        **_spec_fields(spec, count),
        backend=adapter.name,
        framework=adapter.framework,
        collective=collective,
        strategy=strategy.name,
        launcher=resources.launcher,
        launcher_options=resources.options,
        device=devices.kind,
        replicas=count,
        threads=threads,
        processes=processes,
        start_method=resolve_start_method(adapter, resources.launcher, spec, devices.kind),
        environment_variables=adapter.environment_variables(
            device=devices.kind, threads=threads, replicas=count
        ),
        options=options,
        notes=tuple(notes),
        warnings=tuple(warnings),
        parallel_layout=parallel_layout.name,
        device_mesh=mesh,
        extra_ports=parallel_layout.extra_ports,
        requested_collective=requested,
    )


def plan_of_members(
    plan: Plan, resolved_spec: ResolvedSpec, processes: tuple[ProcessInfo, ...]
) -> Plan:
    """The plan with which the members of an elastic run go on.

    The collective is resolved anew: a plan of one replica has none.

    Args:
        plan: Plan with which the run began.
        resolved_spec: Its spec with its plugin references resolved.
        processes: The members, each with one replica, by rank.
    """
    count, collective = len(processes), "none"
    if count > 1:
        adapter = resolved_spec.plugins.backend(plan.backend)
        resolved = adapter.resolve_collective(
            plan.requested_collective, device=plan.device, replicas=count
        )
        layout = resolved_spec.strategy.parallel_layout.for_replicas(count)
        collective = layout.collective(adapter, resolved)
    return replace(
        plan,
        **_spec_fields(resolved_spec.spec_with_model, count),
        processes=processes,
        replicas=count,
        device_mesh=DeviceMesh({DATA: count}),
        collective=collective,
    )


def _elastic_notes(
    resolved_spec: ResolvedSpec, adapter: Adapter, resources: Resources, devices: Devices
) -> list[str]:
    """Notes on an elastic run; refuses it where the other replicas cannot go on when a process is lost.

    Raises:
        PlanError: The run has fewer replicas than the smallest number, or more than the largest.
        UnsupportedError: Launcher, strategy, backend or device do not support it.
    """
    spec, strategy = resolved_spec.spec, resolved_spec.strategy
    if spec.elastic is None:
        return []
    if spec.elastic.min > devices.replicas:
        raise PlanError(
            f"elastic.min: expected at most the {counted(devices.replicas, 'replica')} of the run, received"
            f" {spec.elastic.min}."
        )
    if spec.elastic.max is not None and spec.elastic.max < devices.replicas:
        raise PlanError(
            f"elastic.max: expected at least the {counted(devices.replicas, 'replica')} of the run, received"
            f" {spec.elastic.max}."
        )
    reason = _why_not_elastic(resolved_spec, resources)
    if reason is not None:
        pass
    elif fault := strategy.why_not_elastic():
        reason = f"strategy {strategy.name!r}: {fault}. Use data-parallel"
    elif devices.kind != "cpu":
        reason = "on GPUs: calls of NCCL do not fail when a process is lost"
    else:
        fault = adapter.why_not_elastic(strategy.requires)
        reason = fault and f"backend {adapter.name!r}: {fault}"
    if reason:
        raise UnsupportedError(
            f"elastic: {reason}. Or leave elastic out: --max-restarts restarts from the last checkpoint."
        )
    if resources.launcher == LOCAL:
        return []
    return [
        "elastic: `isotrain join` on another host adds a process; the launchers slurm and ray call it in"
        " place of one that is lost. The run fails if rank 0 is lost"
    ]


def _why_not_elastic(resolved_spec: ResolvedSpec, resources: Resources) -> str | None:
    """Reason why what starts the processes does not let the others go on when one is lost; None: it does."""
    if resources.joins:
        return None
    if resources.options is None:
        environment = resolved_spec.plugins.environment(resources.launcher)
        return environment.why_not_elastic(os.environ)
    return resolved_spec.plugins.launcher(resources.launcher, resources.options).why_not_elastic()


def resolve_start_method(
    adapter: Adapter, launcher: str, spec: TrainingSpec, device: DeviceKind
) -> StartMethod:
    """Chooses `forked` if launcher, system and backend support it, and `ISOTRAIN_START` is not `fresh`.

    Args:
        adapter: Adapter of the backend.
        launcher: Name of the launcher.
        spec: Training spec.
        device: Device of the replicas.

    Raises:
        PlanError: `ISOTRAIN_START` has another value than `forked` and `fresh`.
    """
    requested = os.environ.get(START_VARIABLE) or "forked"
    if requested not in _START_METHODS:
        raise PlanError(
            f"{START_VARIABLE}: {unknown_name('way to start processes', requested, _START_METHODS)}"
        )
    if requested == "fresh":
        return StartMethod(why_fresh=f"{START_VARIABLE}=fresh")
    if launcher != LOCAL:
        return StartMethod(why_fresh=f"{launcher} starts each process itself")
    obstacle = fork_obstacle()
    return (
        adapter.preload(spec, device=device)
        if obstacle is None
        else StartMethod(why_fresh=obstacle)
    )


def _spec_fields(spec: TrainingSpec, replicas: int) -> dict[str, Any]:
    """Fields of a plan that depend on the spec and the number of replicas alone."""
    global_batch_size = spec.resolve_global_batch_size(replicas)
    factor = spec.scaling.factor(global_batch_size)
    return {
        "run": spec.name,
        "strategy_options": spec.strategy.options,
        "precision": spec.precision,
        "global_batch_size": global_batch_size,
        "local_batch_sizes": _local_batch_sizes(global_batch_size, replicas, spec.dealt_parts),
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
        "scaling": f"{spec.scaling.rule} (x {factor:g})",
        "optimizer": spec.optimizer.name,
        "learning_rate": spec.optimizer.lr * factor,
        "timeouts": spec.timeouts.model_dump(),
        "loggers": tuple(chosen.name for chosen in spec.loggers),
    }


def _resources(
    launcher: LauncherChoice | None,
    adapter: Adapter,
    strategy: Strategy,
    replicas: int | None,
    host: PluginManager,
) -> tuple[Resources, list[str]]:
    """Resources of the processes that a launcher will start, with a note if it cannot start them from here.

    Raises:
        PlanError: It does not start this backend, or has no allocation.
    """
    choice = launcher or LauncherChoice()
    planned_launcher = host.launcher(choice.name, choice.options)
    if replicas:
        processes = strategy.parallel_layout.for_replicas(replicas).processes(adapter, replicas)
        if added := planned_launcher.options_for(len(processes)):
            choice = LauncherChoice(choice.name, {**choice.options, **added})
            planned_launcher = host.launcher(choice.name, choice.options)
    launcher_notes = why_not_from_here(planned_launcher)
    allocation = planned_launcher.allocation()
    require_launchable(planned_launcher, adapter, 1 if allocation is None else allocation.slots)
    if allocation is None:
        return LocalResources(choice), launcher_notes
    return ClusterResources(layout_of(choice.name, allocation), choice.options), launcher_notes


def _require_available(kind: str, name: str, availability: Availability) -> None:
    if not availability.available:
        text = f"{kind} {name!r} cannot be used here: {availability.reason}. What to do: {availability.hint}."
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
    """Names the capabilities that the strategy requires and the backend lacks in its parallel layout."""
    parallel_layout = strategy.parallel_layout
    missing = adapter.capabilities_for(parallel_layout.name).missing(strategy.requires)
    return [f"{parallel_layout.message_prefix}it has {text}" for text in missing]


def _preference_notes(strategy: Strategy, adapter: Adapter, plan: Plan) -> list[str]:
    """Notes on the capabilities that a strategy of several replicas prefers, and the backend lacks."""
    capabilities = adapter.capabilities_for(strategy.parallel_layout.name)
    return [
        f"{strategy.name}: {adapter.name} has {reason}: {instead}"
        for capability, instead in strategy.prefers.items()
        for reason in capabilities.missing({capability})
        if plan.replicas > 1
    ]


def _require_exchange_options_used(
    options: Collection[str], strategy: Strategy, adapter: Adapter
) -> None:
    """Refuses options of the gradient all-reduce for a strategy whose steps have none.

    Raises:
        UnsupportedError: There is such an option.
    """
    if Capability.SYNCHRONOUS_STEP in strategy.requires:
        return
    for option in adapter.replicated_options.intersection(options):
        raise UnsupportedError(
            f"backend_options.{adapter.name}.{option}: it configures the all-reduce of gradients in"
            f" data-parallel steps, which strategy {strategy.name!r} does not have. Leave it out."
        )


def _require_framework(spec: TrainingSpec, framework: str) -> None:
    """Checks that the spec has a model, and a loss or objective, for a framework.

    Raises:
        SpecError: One of them is a table without an entry for the framework.
    """
    for each in spec.update_specs.values():
        for field_name in ("model", "objective", "gradients"):
            each.for_framework(field_name, framework)
        each.losses(framework)


def _require_step_contexts(spec: TrainingSpec, strategy: Strategy, adapter: Adapter) -> None:
    """Refuses objectives that take a step where strategy or backend gives them none.

    Raises:
        UnsupportedError: The workers of a parameter-server run, which compute alone, would compute such an
            objective; or the backend has no step contexts.
    """
    updates = spec.update_specs.values()
    objectives = [each.for_framework("objective", adapter.framework) for each in updates]
    takes_steps = any(callable(each) and takes_step(each) for each in objectives)
    if not (takes_steps or spec.values or spec.frozen):
        return
    if strategy.parallel_layout.name == "parameter-server":
        reason = (
            f"strategy {strategy.name!r} gives it no step, as each worker computes slices alone"
        )
        raise UnsupportedError(
            f"objective: {reason}. Let it take (model, batch), or use strategy data-parallel."
        )
    if not adapter.has_step_contexts:
        raise UnsupportedError(
            f"objective: backend {adapter.name!r} gives it no step. Let it take (model, batch), without"
            " `values` and `frozen`."
        )
    called = [name for each in objectives if callable(each) for name in called_collectives(each)]
    if called and (spec.gradient_accumulation_steps > 1 or spec.reproducible):
        cutting = "reproducible" if spec.reproducible else "gradient_accumulation_steps"
        raise UnsupportedError(
            f"objective: step.{called[0]}: with {cutting} it would see the micro-batch alone. Leave that out."
        )
    if called and (local_reason := _local_update_reason(strategy)):
        raise UnsupportedError(
            f"objective: step.{called[0]}: {local_reason}, so that a loss over all replicas has no gradient."
            " Use strategy data-parallel."
        )


def _local_update_reason(strategy: Strategy) -> str | None:
    """Reason that a strategy has no gradients of what replicas compute together; None if it has."""
    if Capability.LOCAL_STEP not in strategy.requires:
        return None
    return f"under strategy {strategy.name!r} each replica updates weights of its own"


def _require_equal_statistics(
    spec: TrainingSpec, strategy: Strategy, adapter: Adapter, replicas: int
) -> None:
    """Refuses batch normalization over global or ghost batches where it would depend on the replicas.

    Raises:
        UnsupportedError: Strategy or backend cannot.
        PlanError: There are more replicas than ghost batches.
    """
    if spec.batch_norm == "local":
        return
    if local_reason := _local_update_reason(strategy):
        reason = local_reason
    elif strategy.parallel_layout.name not in _UNSHARDED_LAYOUTS:
        reason = f"strategy {strategy.name!r} computes the model in parts"
    elif not adapter.has_step_contexts:
        reason = f"backend {adapter.name!r} has the framework's own batch normalization alone"
    elif spec.batch_norm == "ghost" and replicas > (ghosts := spec.dealt_parts or replicas):
        raise PlanError(
            f"batch_norm: ghost: {counted(replicas, 'replica')}, and the global batch of"
            f" {counted(spec.resolve_global_batch_size(replicas), 'sample')} has"
            f" {counted(ghosts, 'ghost batch')}. Use fewer replicas, or ghost_batches: {replicas}."
        )
    else:
        return
    raise UnsupportedError(
        f"batch_norm: {spec.batch_norm}: {reason}. Use batch_norm: local, or strategy data-parallel."
    )


def _require_sample_draws(spec: TrainingSpec, strategy: Strategy, adapter: Adapter) -> None:
    """Refuses random layers that draw by sample where they cannot.

    Raises:
        UnsupportedError: Strategy or backend cannot.
    """
    if spec.random_layers == "per-replica":
        return
    reason = None
    if strategy.parallel_layout.name in ("pipeline", "parameter-server"):
        reason = f"strategy {strategy.name!r} computes the model in other processes"
    elif not adapter.draws_per_sample:
        reason = f"backend {adapter.name!r} cannot"
    if reason is not None:
        raise UnsupportedError(
            f"random_layers: per-sample: {reason}. Use random_layers: per-replica, or strategy data-parallel."
        )


def _require_ordered_sums(
    spec: TrainingSpec, strategy: Strategy, adapter: Adapter, device: DeviceKind, replicas: int
) -> None:
    """Refuses `reproducible` where sums or kernels depend on the number of replicas.

    Raises:
        UnsupportedError: Strategy, backend or device cannot keep them.
        PlanError: There are more replicas than parts of the global batch.
    """
    if spec.parts is None:
        return
    if not strategy.applies_ordered_sums:
        others = "strategy data-parallel or sharded"
        require_backend_step(strategy, "reproducible", others)
    capabilities = adapter.capabilities_for(strategy.parallel_layout.name)
    if reasons := capabilities.missing({Capability.ORDERED_SUMS}):
        raise UnsupportedError(
            f"reproducible: backend {adapter.name!r} has {'; '.join(reasons)}. Leave it out, or"
            " choose another backend or strategy."
        )
    if device == "gpu":
        raise UnsupportedError(
            "reproducible: kernels of GPUs may add in another order each time. Use device: cpu."
        )
    if replicas > spec.parts:
        raise PlanError(
            f"reproducible: {counted(replicas, 'replica')}, and the global batch has"
            f" {counted(spec.parts, 'part')}. Use fewer replicas, or"
            f" reproducible: {{granularity: {1 << (replicas - 1).bit_length()}}}."
        )


def _reproducible_notes(spec: TrainingSpec) -> list[str]:
    if spec.parts is None:
        return []
    notes = [
        f"reproducible: each global batch is computed in {counted(spec.parts, 'part')}, and everything is"
        " summed over these in one order: results are equal to the bit for any number of replicas up to"
        " that, with the same framework, kernels and threads"
    ]
    if spec.shares is not None:
        notes.append(
            "shares: parts are dealt equally at first, and after every"
            f" {counted(spec.shares.every, 'step')} by the speeds of the replicas in these"
        )
    if spec.drop_outliers is not None:
        notes.append(
            "drop_outliers: each replica keeps the gradients of all its parts until it knows their norms"
        )
    if spec.verify_every is not None:
        notes.append(
            f"verify_every: in one step of {spec.verify_every}, each replica computes one part more"
        )
    return notes


def _idle_replica_warnings(spec: TrainingSpec, replicas: int) -> list[str]:
    """Warning of replicas that no global batch of the data has samples for."""
    size = spec.resolve_global_batch_size(replicas)
    idle = _local_batch_sizes(size, replicas, spec.dealt_parts).count(0)
    if spec.data is None or not idle:
        return []
    return [
        f"global_batch_size: {counted(size, 'sample')} for {counted(replicas, 'replica')}: {idle} of these"
        " get none and contribute nothing. Raise global_batch_size, or use fewer replicas"
    ]


def _require_momentum(spec: TrainingSpec, strategy: Strategy) -> None:
    """Refuses a schedule of the momentum where the optimizer or the strategy cannot have one.

    Raises:
        UnsupportedError: The optimizer has no momentum, or its groups have others; or servers apply it.
    """
    schedule, optimizer = spec.schedule, spec.optimizer
    if not isinstance(schedule, OneCycleSchedule) or schedule.momentum_range is None:
        return
    if strategy.parallel_layout.name == "parameter-server":
        reason = f"strategy {strategy.name!r} applies gradients elsewhere, by a momentum that stays"
    elif any({"momentum", "beta_1"} & group.options.keys() for group in optimizer.groups):
        reason = "it sets the momentum of all weights, and optimizer.groups that of some"
    elif optimizer.name != "custom" and not (
        getattr(optimizer, "momentum", 0) or getattr(optimizer, "beta_1", 0)
    ):
        reason = f"optimizer {optimizer.name} has no momentum"
    else:
        return
    raise UnsupportedError(f"schedule: momentum_range: {reason}. Leave one of the two out.")


def _unused_options_warnings(spec: TrainingSpec, backends: Sequence[str]) -> list[str]:
    """Warnings of options of unknown backends: misspelled, or of a plugin that is not installed here."""
    return [
        f"backend_options.{name}: unknown backend, these options have no effect."
        f"{did_you_mean(name, backends)}"
        for name in spec.backend_options
        if name not in backends
    ]


def _updates_notes(spec: TrainingSpec, strategy: Strategy, adapter: Adapter) -> list[str]:
    """Notes on the named updates: when each is done, and its optimizer.

    Raises:
        UnsupportedError: Strategy or backend cannot do them.
    """
    if not spec.updates:
        return []
    if not strategy.steps_named_updates:
        raise UnsupportedError(
            f"updates: strategy {strategy.name!r} cannot step several updates of one model by turns. Use"
            " strategy data-parallel."
        )
    if not isinstance(adapter, NamedUpdatesBackend):
        raise UnsupportedError(
            f"updates: backend {adapter.name!r} has no named updates (no method start_updates). Use another"
            " backend, or one objective and optimizer."
        )
    return [
        f"updates.{name}: weights {', '.join(update.weights)} by {each.optimizer.name}"
        + (f", every {update.every} steps" if update.every > 1 else "")
        + (f", from epoch {update.from_epoch}" if update.from_epoch else "")
        for (name, update), each in zip(
            spec.updates.items(), spec.update_specs.values(), strict=True
        )
    ]


def _compile_notes(spec: TrainingSpec, strategy: Strategy, adapter: Adapter) -> list[str]:
    """Notes on `compile`.

    Raises:
        UnsupportedError: The model cannot be compiled.
    """
    if not spec.compile:
        return []
    if adapter.compiler is None:
        raise UnsupportedError(f"compile: backend {adapter.name!r} has no compiler. Leave it out.")
    if strategy.parallel_layout.name != "replicated":
        raise UnsupportedError(
            f"compile: the model is not compiled in {strategy.parallel_layout.name} runs, such"
            f" as those of {strategy.name!r}. Leave it out."
        )
    return [
        f"compile: {adapter.compiler} compiles the model; the result is not bit-identical to an"
        " uncompiled run"
    ]


def _require_optimizer_groups(spec: TrainingSpec, adapter: Adapter, strategy: Strategy) -> None:
    """Refuses groups of weights, and layer-wise rates, for a backend that has none.

    Raises:
        UnsupportedError: The backend updates all weights with the same options; or servers apply gradients
            at the rate of the step, and a group has a schedule.
    """
    if spec.optimizer.group_schedules and strategy.parallel_layout.name == "parameter-server":
        raise UnsupportedError(
            f"optimizer.groups: schedule: strategy {strategy.name!r} applies gradients elsewhere, at the rate"
            " of the step. Give an lr_factor."
        )
    for name in ("groups", "layer_decay"):
        if getattr(spec.optimizer, name) and not adapter.has_optimizer_groups:
            raise UnsupportedError(
                f"optimizer.{name}: backend {adapter.name!r} updates all weights with the same options."
                " Leave it out."
            )


_UNSHARDED_LAYOUTS = ("replicated", "sharded", "tensor")
"""Parallel layouts in which every replica has all weights after each step."""


def _require_gradient_norm(spec: TrainingSpec, strategy: Strategy, replicas: int) -> None:
    """Refuses `gradient_norm` where no replica has the gradients that update the weights.

    Raises:
        UnsupportedError: Replicas have gradients of their own, or of a part of the weights.
    """
    layout = strategy.parallel_layout.for_replicas(replicas).name
    is_equal = replicas == 1 or (
        strategy.keeps_replicas_equal == "always" and Capability.LOCAL_STEP not in strategy.requires
    )
    if spec.gradient_norm and (layout not in ("replicated", "tensor") or not is_equal):
        raise UnsupportedError(
            f"gradient_norm: under strategy {strategy.name!r} no process has all gradients that update the"
            " weights of a step, of which the norm is. Leave it out, or use data-parallel."
        )


def _average_notes(spec: TrainingSpec, strategy: Strategy, replicas: int) -> list[str]:
    """Notes on the average of the weights over steps (`ema`, `swa`).

    Raises:
        UnsupportedError: Replicas would have different weights to average, or only a part of them.
    """
    if spec.weight_average is None:
        return []
    name = "swa" if spec.ema is None else "ema"
    layout = strategy.parallel_layout.for_replicas(replicas).name
    if layout not in _UNSHARDED_LAYOUTS:
        raise UnsupportedError(
            f"{name}: in {layout} runs, such as those of strategy {strategy.name!r}, no replica has all"
            " weights after each step, of which an average is made. Leave it out, or use data-parallel."
        )
    if replicas > 1 and strategy.keeps_replicas_equal != "always":
        raise UnsupportedError(
            f"{name}: under strategy {strategy.name!r} each replica trains weights of its own, and an average"
            " of these is not that of the run. Leave it out, or use data-parallel."
        )
    return [
        f"{name}: evaluation, predictions, the best checkpoint and the result use the average of the weights;"
        " it takes the memory of one more copy of them"
    ]


def _per_replica_notes(spec: TrainingSpec, strategy: Strategy, adapter: Adapter) -> list[str]:
    """Note on state that each replica keeps for itself (`per_replica`).

    Raises:
        UnsupportedError: Backend or parallel layout have no such state.
    """
    if not spec.per_replica:
        return []
    if not adapter.has_per_replica_state:
        raise UnsupportedError(
            f"per_replica: backend {adapter.name!r} has no state that differs between replicas. Leave it out."
        )
    layout = strategy.parallel_layout.name
    if layout not in _UNSHARDED_LAYOUTS:
        raise UnsupportedError(
            f"per_replica: in {layout} runs, such as those of strategy {strategy.name!r}, no replica has the"
            " whole model with its state. Leave it out, or use data-parallel."
        )
    return [
        f"per_replica: each replica keeps {', '.join(spec.per_replica)} for itself, in checkpoints too; files"
        " of weights and exported models have replica 0's"
    ]


def _local_batch_sizes(global_batch_size: int, replicas: int, parts: int | None) -> tuple[int, ...]:
    bounds = (
        sampler.slice_bounds(global_batch_size, replicas, replica, parts)
        for replica in range(replicas)
    )
    return tuple(stop - start for start, stop in bounds)
