"""The parent side of a run: from the request to its end, with restarts after failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.events import Event, OnEvent, OnPlainEvent, Restarted, Steps
from isotrain.core.contracts.job import Job, Work
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import Plan, backend_label
from isotrain.core.errors import EndedError, NotANumberError, PlanError, RunFailedError
from isotrain.core.launching.forkserver.process_starter import start_fork_server
from isotrain.core.launching.run_directory.rank_output import shown_ranks
from isotrain.core.launching.run_directory.run_directory import RunDirectory, checkpoint_folder
from isotrain.core.launching.run_job import JobLauncher, run_job
from isotrain.core.loggers.dispatcher import EventDispatcher
from isotrain.core.planning.cluster_environment import detect_cluster_info, explain_rank
from isotrain.core.planning.launcher_support import require_interface_used, require_startable
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.run.options import RunOptions
from isotrain.core.run.start import locked_run_directory, starting_checkpoint
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.standard_streams import replace_closed_streams
from isotrain.core.system.version import versions

if TYPE_CHECKING:
    from isotrain.core.checkpoints.checkpoint import Checkpoint

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RunOutcome:
    """A run that has ended well.

    Attributes:
        returned: Return value of `work` on each process with a session, by rank.
        directory: Run directory.
        dispatcher: Listeners that learn how the run ended; None on ranks above 0 that a scheduler started.
        restarts: One record for each restart; see `RunResult`.
    """

    returned: list[Any]
    directory: RunDirectory
    dispatcher: EventDispatcher | None = None
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, records: Mapping[str, Mapping[str, Any]], result: Any) -> None:
        """Writes the last records into the run directory, and checks that the others are still there.

        Args:
            records: Fields of each record, by the name of its file.
            result: Result that the caller is about to return.

        Raises:
            RunFailedError: Records cannot be written or were removed; has the result.
        """
        try:
            for name, fields in records.items():
                self.directory.write(name, fields)
            self.directory.require_kept()
        except RunFailedError as failure:
            failure.result = result
            raise


Conclude = Callable[[RunOutcome], _Result]
"""Makes the result of a run of its outcome, while the run's directory is still locked and listeners wait."""


def execute(
    work: Work, spec: SpecLike, backend: str, options: RunOptions, conclude: Conclude[_Result]
) -> _Result:
    """Runs `work` on every process of a run, and returns what `conclude` makes of the outcome.

    Starts the processes, unless a scheduler or launcher has started this process as a rank: then all ranks
    meet, and rank 0 has the parent's part.

    Args:
        work: Called on every process with its session.
        spec: Training spec.
        backend: `NAME` or `NAME:COLLECTIVE`.
        options: Options of the run.
        conclude: Called once, when the run has ended well.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
        RunFailedError: A process failed, and no restart was left.
    """
    replace_closed_streams()
    launcher = LauncherChoice(
        options.get("launcher") or LOCAL, options.get("launcher_options") or {}
    )
    cluster = None if launcher.name != LOCAL else detect_cluster_info()
    if cluster is None:
        resolved = ResolvedSpec(*_load(spec))
        plan = make_plan(
            resolved, backend=backend, replicas=options.get("replicas"), launcher=launcher
        )
        require_interface_used(options.get("interface"), plan)
        require_startable(resolved.plugins.launcher(plan.launcher, plan.launcher_options))
        return _lead(work, resolved, plan, options, conclude, None)
    from isotrain.core.rendezvous.nonzero_rank import run_nonzero_rank  # these import NumPy
    from isotrain.core.rendezvous.rank_zero import RankZeroLauncher
    from isotrain.core.rendezvous.worker_group import join_worker_group

    _require_no_restarts(options.get("max_restarts", 0), cluster)
    workers = join_worker_group(
        cluster,
        lambda: _load(spec),
        backend=backend,
        replicas=options.get("replicas"),
        port=options.get("port"),
        interface=options.get("interface"),
    )
    with workers.rendezvous.broadcasting_errors():
        plan = make_plan(
            workers.resolved_spec,
            backend=backend,
            replicas=options.get("replicas"),
            launcher=launcher,
            layout=workers.layout,
        )
        if workers.rank == 0:
            return _lead(
                work, workers.resolved_spec, plan, options, conclude, RankZeroLauncher(workers)
            )
    returned, directory = run_nonzero_rank(
        workers, Job(work, workers.resolved_spec.spec, plan, b"", selection.current())
    )
    return conclude(RunOutcome(returned, RunDirectory(Path(directory))))


def _load(spec: SpecLike) -> tuple[TrainingSpec, PluginManager]:
    loaded = load_spec(spec)
    return loaded, plugin_manager(loaded.plugins)


def _require_no_restarts(max_restarts: int, cluster: ClusterInfo) -> None:
    if max_restarts:
        raise PlanError(
            f"max_restarts: this process was started by {cluster.environment}, which alone can start it"
            f" again. Ask it to, and say --resume auto (resume= in Python). {explain_rank(cluster)}"
        )


def _lead(
    work: Work,
    resolved: ResolvedSpec,
    plan: Plan,
    options: RunOptions,
    conclude: Conclude[_Result],
    launcher: JobLauncher | None,
) -> _Result:
    """Runs the parent's part: run directory, listeners, display, processes, restarts."""
    spec, host, resume = resolved.spec, resolved.plugins, options.get("resume")
    ranks = _shown_ranks(plan, options.get("ranks", (0,)))
    loggers = [host.logger(chosen.name, chosen.options) for chosen in spec.loggers]
    with locked_run_directory(spec, options.get("run_directory"), resume) as directory:
        checkpoint = starting_checkpoint(spec, directory, resume)
        _require_same_run(checkpoint, spec, plan)
        start_fork_server(plan)  # now that nothing is refused any more: it takes longest
        dispatcher = EventDispatcher(host, loggers, plan.to_dict(), directory.path)
        if resume is not None:
            step = 0 if checkpoint is None else checkpoint.step
            directory.rewind(step)
            dispatcher.rewind_to(step)
        packages = versions(host.backend(plan.backend).packages)
        directory.write_start(spec, plan, packages)
        with dispatcher, _display(plan, directory.path, ranks, options.get("on_event")) as show:
            outcome = _run_with_restarts(
                work, resolved, plan, options, directory, checkpoint, dispatcher, show, launcher
            )
            return conclude(outcome)


def _run_with_restarts(
    work: Work,
    resolved: ResolvedSpec,
    plan: Plan,
    options: RunOptions,
    directory: RunDirectory,
    checkpoint: Checkpoint | None,
    dispatcher: EventDispatcher,
    show: OnEvent,
    launcher: JobLauncher | None,
) -> RunOutcome:
    """Runs the job until it ends well, or has failed too often.

    A restart continues from the newest checkpoint. Where a host was lost, or an earlier restart began at the
    same step, the plan gets fewer replicas if the spec allows that.

    Raises:
        RunFailedError: The last attempt failed; or a loss was NaN, which it would be again; or the run was
            told to end; or the run directory was removed.
    """
    start = checkpoint
    steps_done = 0
    restarts: list[dict[str, Any]] = []

    def on_event(event: Event) -> None:
        nonlocal steps_done
        if isinstance(event, Steps):
            steps_done = event.first + len(event.losses)
        show(event)
        dispatcher.dispatch(event)

    while True:
        steps_done = 0
        try:
            returned = run_job(
                work,
                resolved.spec,
                plan,
                resolved.plugins,
                directory,
                on_event=on_event,
                first_port=options.get("port"),
                resume=None if start is None else start.location,
                interface=options.get("interface"),
                launcher=launcher,
            )
            return RunOutcome(returned, directory, dispatcher, restarts)
        except (NotANumberError, EndedError):
            raise
        except RunFailedError as failure:
            if len(restarts) >= options.get("max_restarts", 0) or directory.removed():
                raise
            start = _newest(resolved.spec, directory) or checkpoint
            step = 0 if start is None else start.step
            if failure.lost_host is not None or any(each["from_step"] == step for each in restarts):
                plan = _smaller(resolved, plan, failure.lost_host)
            directory.rewind(step)
            dispatcher.rewind_to(step)
            reached = steps_done if failure.steps_done is None else failure.steps_done
            facts = {"after_step": max(reached, step), "from_step": step, "replicas": plan.replicas}
            restarts.append({"failure": str(failure).partition("\n")[0], **facts})
            restarted = Restarted(time=time.time(), failure=str(failure), **facts)
            directory.append_event(restarted)
            on_event(restarted)


def _newest(spec: TrainingSpec, directory: RunDirectory) -> Checkpoint | None:
    """The newest complete checkpoint of a run."""
    from isotrain.core.checkpoints.folder import CheckpointFolder  # it imports NumPy

    return CheckpointFolder(checkpoint_folder(spec, directory.path)).newest()


def _smaller(resolved: ResolvedSpec, plan: Plan, lost_host: str | None) -> Plan:
    """A plan without a lost host, or with fewer replicas; the same plan if the spec allows no smaller one."""
    least = resolved.spec.min_replicas
    if least is None:
        return plan
    try:
        smaller = (
            _with_fewer_replicas(resolved, plan)
            if lost_host is None
            else _without_host(resolved, plan, lost_host)
        )
    except PlanError:
        return plan
    return smaller if smaller.replicas >= least else plan


def _requested_backend(plan: Plan) -> str:
    return backend_label(plan.backend, plan.requested_collective)


def _without_host(resolved: ResolvedSpec, plan: Plan, lost_host: str) -> Plan:
    options = plan.launcher_options or {}
    changes = resolved.plugins.launcher(plan.launcher, options).without(lost_host)
    launcher = LauncherChoice(plan.launcher, {**options, **changes})
    return make_plan(resolved, backend=_requested_backend(plan), replicas=None, launcher=launcher)


def _with_fewer_replicas(resolved: ResolvedSpec, plan: Plan) -> Plan:
    """The plan with the most replicas below those of a plan: a strategy may not take every number."""
    launcher = LauncherChoice(plan.launcher, plan.launcher_options or {})
    for count in range(plan.replicas - 1, 1, -1):
        with contextlib.suppress(PlanError):
            return make_plan(
                resolved, backend=_requested_backend(plan), replicas=count, launcher=launcher
            )
    return make_plan(resolved, backend=_requested_backend(plan), replicas=1, launcher=launcher)


@contextlib.contextmanager
def _display(
    plan: Plan, directory: Path, ranks: Sequence[int], on_event: OnPlainEvent | None
) -> Iterator[OnEvent]:
    """Shows the events of a run and the output of chosen ranks, by a user's function or on the screen."""
    display: contextlib.AbstractContextManager[OnEvent]
    if on_event is not None:
        display = contextlib.nullcontext(lambda event: on_event(event.to_dict()))
    else:
        from isotrain.core.reporting.display_thread import threaded_display
        from isotrain.core.reporting.progress import automatic

        display = threaded_display(automatic(plan))
    with display as show_event, shown_ranks(directory, ranks, show_event) as show:
        yield show


def _shown_ranks(plan: Plan, requested: Sequence[int] | Literal["all"]) -> Sequence[int]:
    """The ranks whose output is shown.

    Raises:
        PlanError: The run does not have one of them, or the text is not `all`.
    """
    count = len(plan.processes)
    if isinstance(requested, str) and requested != "all":
        raise PlanError(
            f"ranks: expected 'all' or a sequence of numbers, such as [0, 1]; received {requested!r}."
        )
    ranks = range(count) if isinstance(requested, str) else requested
    for rank in ranks:
        if not 0 <= rank < count:
            raise PlanError(
                f"ranks: {rank} is no rank of this run; expected 0 to {count - 1}: it has {count} processes."
            )
    return ranks


def _require_same_run(checkpoint: Checkpoint | None, spec: TrainingSpec, plan: Plan) -> None:
    """Refuses a checkpoint of another run before anything is touched."""
    if checkpoint is not None:
        from isotrain.core.session.checkpointing import resume_check

        resume_check.changes(resume_check.SavedRun(checkpoint), spec, plan)
