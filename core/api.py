"""The functions that users call from Python: run, launch, resume, open_session, plan."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from isotrain.core.contracts.backend.adapter_protocols import Message
from isotrain.core.contracts.backend.group_hooks import PassCosts
from isotrain.core.contracts.events import RunFailed
from isotrain.core.contracts.launcher import LOCAL, Allocation, HostSlots, LauncherChoice
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.process import LOCALHOST, ProcessContext
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.data.refusals import LOSS, RefusedError
from isotrain.core.errors import PlanError, RunFailedError, UnsupportedError, ValuesNeededError
from isotrain.core.launching.probe_run import plan_here, probe_rank_zero, probe_run
from isotrain.core.launching.run_directory.run_directory import PLAN_FILE, RESULT_FILE
from isotrain.core.pipeline.profile import LayerCost
from isotrain.core.planning import gpu_plan as gpu_plans
from isotrain.core.planning.backend_choice import resolve_backend
from isotrain.core.planning.cluster_environment import detect_cluster_info, explain_rank
from isotrain.core.planning.cluster_resources import ClusterResources, layout_of
from isotrain.core.planning.gpu_plan import GpuPlan
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.quantities import counted
from isotrain.core.reporting.status import waiting
from isotrain.core.results.result import RunResult, result_from_dict
from isotrain.core.run.controller import RunOutcome, prepare
from isotrain.core.run.options import ResumeOptions, RunOptions, require_known
from isotrain.core.run.start import PreviousRun
from isotrain.core.session.weights.weights_file import WEIGHTS_FILE
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.sections import StrategyLike
from isotrain.core.system import hardware
from isotrain.core.system.process import environ_set
from isotrain.core.worker.entry_points import LOST_WEIGHTS, measure_model, record_steps, train

if TYPE_CHECKING:
    from isotrain.core.session.session import Session

T = TypeVar("T")


def run(spec: SpecLike, *, backend: str | None = None, **options: Unpack[RunOptions]) -> RunResult:
    """Trains a spec under a backend, in processes of its own.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backend: `NAME` or `NAME:COLLECTIVE`, such as `tf-multiworker:ring`; left out: the spec's, or `auto`,
            the first one that is available here and trains the spec's model.
        **options: Options of where the run takes place, and who watches it; see `RunOptions`:

            * replicas: number of replicas; left out: one per GPU that can be used, or one.
            * output: new or empty folder for the run's files; left out: `runs/<name>-<time>`.
            * on_event: function that gets each event as a mapping; left out: a progress display.
            * quiet: whether to show no progress; `verbose`: whether to show every epoch of a long run.
            * port: first port that the backend may use; left out: free ports are found.
            * launcher: name of the launcher; `local` (default) starts the processes on this machine.
            * launcher_options: options of the launcher, such as `{"hosts": "node1:2,node2:2"}`.
            * resume: checkpoint, folder or URL of checkpoints, or run directory to continue from; `auto`: the
              newest checkpoint of this run directory or checkpoint folder, if there is one.
            * max_restarts: how often to start again from the last checkpoint after a failure (default 0).
            * ranks: ranks whose output is shown (default `(0,)`), or `all`.
            * interface: network interface, by name or address, for processes on several hosts.

    Returns:
        History, metrics, timings, final weights, and where the run's files are.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
        RunFailedError: A process failed; the error names rank, step, call and cause.
    """
    require_known("run", RunOptions, options)
    return prepare(train, spec, backend, options).run(_result)


def _result(outcome: RunOutcome) -> RunResult:
    """Makes the result of a training, and keeps it in the run directory."""
    fields = dict(outcome.returned[0])
    lost = fields.pop(LOST_WEIGHTS, None)  # where isotrain ran elsewhere, it has failed there
    result = result_from_dict({**fields, "restarts": outcome.restarts}, outcome.directory.path)
    if outcome.dispatcher is not None:
        outcome.keep({PLAN_FILE: result.plan, RESULT_FILE: result.to_dict()}, result)
        outcome.dispatcher.result = result.to_dict()
    if lost is not None:
        target = outcome.directory.path / WEIGHTS_FILE
        message = (
            f"all steps were taken, but {target} could not be written: {lost}. All else is there."
        )
        if outcome.dispatcher is not None:
            with contextlib.suppress(OSError):  # the failure itself is what has to be told
                outcome.directory.append_event(RunFailed(time=time.time(), message=message))
        failure = RunFailedError(message)
        failure.result = result
        raise failure
    return result


def launch(
    work: Callable[[Session], T],
    spec: SpecLike,
    *,
    backend: str | None = None,
    **options: Unpack[RunOptions],
) -> list[T]:
    """Runs your own training loop on every process of a run.

    Args:
        work: `work(session)`; see `Session`. It may be defined in the script that calls this.
        spec: See `run`.
        backend: See `run`.
        **options: Options of `run`. With `resume`, the session has loaded the checkpoint when `work` gets it.

    Returns:
        Return values of `work` on each process, by rank: numbers, text, NumPy arrays, and lists and dicts of
        these.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
        RunFailedError: A process failed; the error names rank, step, call and cause.
    """
    require_known("launch", RunOptions, options)

    def conclude(outcome: RunOutcome) -> list[T]:
        outcome.keep({}, outcome.returned)
        return outcome.returned

    return prepare(work, spec, backend, options).run(conclude)


def resume(
    run: str | os.PathLike[str],
    *,
    spec: SpecLike | None = None,
    overrides: Sequence[str] = (),
    strategy: StrategyLike | None = None,
    backend: str | None = None,
    **options: Unpack[ResumeOptions],
) -> RunResult:
    """Continues a run of `run` in its own directory, from its newest checkpoint.

    Args:
        run: Directory of the run.
        spec: Training spec, if it differs from the run's own spec or has functions that no file can name;
            left out: the `spec.json` of the run.
        overrides: Changes of the spec, as `load_spec` takes them: `["epochs=20"]`.
        strategy: Strategy in place of the spec's, as `load_spec` takes it.
        backend: See `run`; left out: the run's own.
        **options: Options of `run`, without `output` and `resume`. Left out, `replicas`, `launcher`
            and `launcher_options` are the run's own. `launcher_options` alone change options of its launcher.

    Raises:
        SpecError: The spec is wrong, or names what cannot be imported.
        PlanError: There is no such run, or it cannot continue like this.
        IsotrainError: The run has no checkpoint, or the spec differs where it must not.
        RunFailedError: A process failed; the error names rank, step, call and cause.
    """
    require_known("resume", ResumeOptions, options)
    previous = PreviousRun.of(run)
    resumed = load_spec(previous.spec if spec is None else spec, overrides, strategy=strategy)
    if options.get("launcher") is None and detect_cluster_info() is None:
        changes = options.get("launcher_options") or {}
        options["launcher"] = previous.launcher.name
        options["launcher_options"] = {**previous.launcher.options, **changes}
    options["replicas"] = options.get("replicas") or previous.replicas
    continued: RunOptions = {
        **options,
        "output": previous.directory,
        "resume": previous.newest_folder(resumed),
    }
    return prepare(train, resumed, backend or previous.backend, continued).run(_result)


def open_session(
    spec: SpecLike, *, backend: str | None = None, replicas: int | None = None
) -> Session:
    """Opens a session in this process, for your own loop or a notebook cell.

    Works for every run of one process: any backend with one replica, and backends that have several
    replicas in one process. Use it in a `with` statement. For several processes, put your loop into a
    function and give it to `launch`.

    Args:
        spec: See `run`.
        backend: See `run`.
        replicas: See `run`.

    Raises:
        UnsupportedError: A scheduler or launcher has started this process as one of several ranks.
        PlanError: The run needs several processes, or Keras already runs on another framework here.
    """
    from isotrain.core.session.session import Session

    place = detect_cluster_info()
    if place is not None:
        raise UnsupportedError(
            f"open_session: {place.environment} has started {counted(place.world_size, 'process')}, and a"
            " session that is opened joins no others. Put the loop into a function and call"
            f" isotrain.launch(function, spec, backend=...), which does. {explain_rank(place)}"
        )
    loaded = load_spec(spec)
    resolved = ResolvedSpec(loaded, plugin_manager(loaded.plugins))
    plan = make_plan(resolved, backend=backend, replicas=replicas)
    if len(plan.processes) > 1:
        raise PlanError(
            f"{plan.backend!r} with {plan.replicas} replicas takes {len(plan.processes)} processes,"
            " and open_session has this one. Put the loop into a function and call"
            " isotrain.launch(function, spec, backend=..., replicas=...)."
        )
    context = ProcessContext(
        0,
        plan.replicas,
        tempfile.gettempdir(),
        plan.processes,
        ((LOCALHOST, 0),),
        device_mesh=plan.device_mesh,
    )
    with environ_set(plan.environment_variables):
        return Session(resolved, plan, context, Reporter())


def plan(
    spec: SpecLike,
    *,
    backend: str | None = None,
    replicas: int | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Resolves a run without starting it; arguments are as for `run`.

    Raises:
        PlanError: Spec, backend and replicas do not fit together.
    """
    loaded = load_spec(spec)
    resolved = ResolvedSpec(loaded, plugin_manager(loaded.plugins))
    choice = LauncherChoice(launcher, launcher_options or {})
    return make_plan(resolved, backend=backend, replicas=replicas, launcher=choice)


def measured_plan(
    spec: SpecLike,
    *,
    backend: str | None = None,
    replicas: int | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Plan:
    """Resolves a run without starting it, with the numbers of samples, parameters and exchanged bytes.

    Arguments are as for `run`. A separate process with one replica loads the data and builds the model.

    Raises:
        SpecError: The loss or the transform fits one replica only.
    """
    loaded = load_spec(spec)
    resolved = ResolvedSpec(loaded, plugin_manager(loaded.plugins))
    choice = LauncherChoice(launcher, launcher_options or {})
    incomplete = make_plan(resolved, backend=backend, replicas=replicas, launcher=choice)
    return complete_plan(incomplete, resolved, _measured_stats(resolved, incomplete, quiet))


def _measured_stats(
    resolved: ResolvedSpec, plan: Plan, quiet: bool, *, with_values: bool = True
) -> ModelStats:
    """Statistics of the data and the model of a plan.

    Raises:
        RunFailedError: The data cannot be loaded or the model cannot be built.
        ValuesNeededError: It takes values to do so, and `with_values` is false.
    """
    with waiting("counting samples and parameters", quiet=quiet):
        if with_values:
            stats = probe_run(measure_model, resolved, plan.backend)
        else:
            here, alone = plan_here(resolved, plan.backend, 1)
            stats = probe_rank_zero(measure_model, here, alone, with_values=False)
    spec = resolved.spec
    has_micro_batches = spec.gradient_accumulation_steps > 1
    for code, detail in stats.pop("refused").items():
        is_divided = plan.replicas > 1 or (code == LOSS and has_micro_batches)
        if is_divided and not spec.silences(code):
            raise RefusedError(code, detail)
    costs = stats["sample_costs"]
    parts = {
        "layers": [LayerCost(**layer) for layer in stats["layers"]],
        "model": ModelBytes(**stats["model"]),
        "sample_costs": None if costs is None else PassCosts(**costs),
    }
    return ModelStats(**{**stats, **parts})


def _recorded_messages(
    resolved: ResolvedSpec, plan: Plan, stats: ModelStats, notes: list[str], lacks_values: bool
) -> tuple[list[tuple[Any, ...]] | None, str | None]:
    """Fields of the messages of rank 0 in some steps; else None, and the reason why they are not counted.

    Args:
        resolved: Spec of the plan.
        plan: Plan of any number of hosts.
        stats: Statistics of its model.
        notes: Gets a note where steps were to be taken without values, and take some.
        lacks_values: Whether to try it without values of large tensors first.
    """
    try:
        try:
            messages = probe_rank_zero(record_steps, resolved, plan, with_values=not lacks_values)
        except ValuesNeededError as error:
            needed = 0 if stats.model is None else stats.model.replicated.total
            if needed > hardware.memory_bytes() / 2:
                from isotrain.core.reporting.tables import size as size_text

                return None, (
                    f"with the values of tensors, steps take {size_text(needed)} of memory or more, and"
                    f" they cannot be taken without: {error.reason}"
                )
            messages = probe_rank_zero(record_steps, resolved, plan)
            notes.append(
                f"collectives: counted in steps with values, which they take: {error.reason}"
            )
    except RunFailedError as error:  # such as a model that needs the values of other replicas
        return None, f"steps of rank 0 alone failed: {error}"
    return messages, None if messages is not None else "the loop makes its batches"


def gpu_plan(
    spec: SpecLike,
    *,
    hosts: int,
    gpus_per_host: int,
    gpu: str | None = None,
    backend: str | None = None,
    quiet: bool = False,
) -> GpuPlan:
    """Plans a run on GPUs of hosts elsewhere; neither is needed here. Other arguments are as for `run`.

    Args:
        spec: What to train.
        hosts: Number of hosts.
        gpus_per_host: Number of GPUs of each, one for each replica.
        gpu: Name of the GPU, such as `h100`; None: any.
        backend: Backend, as for `run`.
        quiet: Whether to show no progress.

    Raises:
        SpecError: The loss or the transform fits one replica only.
        PlanError: Spec, backend and hosts do not fit together, or the GPU is unknown.
    """
    card = None if gpu is None else gpu_plans.gpu(gpu)
    loaded = load_spec(spec).replace(device="gpu")
    resolved = ResolvedSpec(loaded, plugin_manager(loaded.plugins))
    name, _ = split_backend(resolve_backend(backend, resolved))
    holds_all = resolved.plugins.backend(name).replicas_per_process == "all"
    slots = HostSlots(1 if holds_all else gpus_per_host, devices=gpus_per_host)
    layout = layout_of("any launcher", Allocation((slots,) * hosts))
    resources = ClusterResources(layout, {})
    incomplete = make_plan(resolved, backend=backend, replicas=None, resources=resources)
    notes: list[str] = []
    lacks_values = gpu_plans.may_lack_values(resolved, incomplete)
    try:
        stats = _measured_stats(resolved, incomplete, quiet, with_values=not lacks_values)
    except ValuesNeededError as error:
        notes.append(f"model: built with its values, which it takes: {error.reason}")
        lacks_values, stats = False, _measured_stats(resolved, incomplete, quiet)
    plan = complete_plan(incomplete, resolved, stats)
    obstacle = gpu_plans.counting_obstacle(resolved, plan)
    messages = None
    if obstacle is None:
        with waiting("counting collectives", quiet=quiet):
            messages, obstacle = _recorded_messages(resolved, plan, stats, notes, lacks_values)
    if messages is not None and any(each.role == "server" for each in plan.processes):
        notes.append(
            "collectives: what rank 0 sends; besides, servers send their weights to a worker for each slice"
        )
    plan = replace(plan, notes=(*plan.notes, *notes))
    counted = None
    if messages is not None:
        counted = gpu_plans.collectives(
            [Message(*each) for each in messages],
            gpu_plans.counted_steps(resolved.spec, resolved.strategy),
            plan,
        )
    result = GpuPlan(plan, counted, obstacle, gpu_plans.needed_bytes(plan), gpu)
    if card is None:
        return result
    bounds = gpu_plans.step_bounds(plan, stats, counted, card)
    alternatives = (
        tuple(gpu_plans.fitting_alternatives(resolved, plan, stats, resources, card.memory_bytes))
        if result.fits is False
        else ()
    )
    return replace(result, bounds=bounds, alternatives=alternatives)
