"""The parent side of a run: from the request to its end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.events import (
    STOP,
    CheckpointSaved,
    Event,
    LauncherNote,
    MembersChanged,
    OnEvent,
    OnPlainEvent,
    Output,
    Restarted,
    Warned,
    WorkerLost,
)
from isotrain.core.contracts.job import Job, Work
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import EndedError, NotANumberError, PlanError, RunFailedError
from isotrain.core.launching.forkserver.process_starter import start_fork_server
from isotrain.core.launching.run_directory.pipes import LogTail
from isotrain.core.launching.run_directory.run_directory import (
    RunDirectory,
    last_weights_file,
    rank_log,
)
from isotrain.core.launching.run_job import JobLauncher, run_job
from isotrain.core.loggers.dispatcher import EventDispatcher
from isotrain.core.planning.cluster_environment import detect_cluster_info, explain_rank
from isotrain.core.planning.cluster_resources import ClusterResources
from isotrain.core.planning.launcher_support import require_interface_used, require_startable
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.quantities import counted
from isotrain.core.run.options import RunOptions
from isotrain.core.run.restarts import Restarts
from isotrain.core.run.start import locked_run_directory, starting_checkpoint
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.periodic import repeated
from isotrain.core.system.standard_streams import replace_closed_streams
from isotrain.core.system.version import versions

if TYPE_CHECKING:
    from isotrain.core.checkpoints.checkpoint import Checkpoint
    from isotrain.core.rendezvous.worker_group import WorkerGroup

_Result = TypeVar("_Result")
_POLL_SECONDS = 0.2
_LOG = logging.getLogger("isotrain.run")
_LOG.addHandler(
    logging.NullHandler()
)  # the display shows the same to who has configured no logging


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


@dataclass(frozen=True)
class RunController:
    """The parent's side of a run; in a run whose processes were started from outside, rank 0's.

    Attributes:
        work: Called on every process with its session.
        resolved: Spec with its plugins.
        plan: Plan of the run.
        options: Options of the run.
        workers: Worker group of this process; None if a launcher starts the processes.
    """

    work: Work
    resolved: ResolvedSpec
    plan: Plan
    options: RunOptions
    workers: WorkerGroup | None = None

    def run(self, conclude: Conclude[_Result]) -> _Result:
        """Runs `work` on every process, and returns what `conclude` makes of the outcome.

        Args:
            conclude: Called once, when the run has ended well.

        Raises:
            PlanError: The run directory or the checkpoint does not fit.
            RunFailedError: A process failed, and no restart was left; or a loss was NaN, which it would be
                again; or the run was told to end; or the run directory was removed.
        """
        spec, host, options = self.resolved.spec, self.resolved.plugins, self.options
        resume = options.get("resume")
        with contextlib.ExitStack() as cleanup:
            launcher = None if self.workers is None else _rank_zero_launcher(self.workers, cleanup)
            ranks = _shown_ranks(self.plan, options.get("ranks", (0,)))
            loggers = [host.logger(chosen.name, chosen.options) for chosen in spec.loggers]
            directory = cleanup.enter_context(
                locked_run_directory(spec, options.get("output"), resume)
            )
            checkpoint = starting_checkpoint(spec, directory, resume)
            _require_same_run(checkpoint, spec, self.plan)
            start_fork_server(self.plan)  # now that nothing is refused any more: it takes longest
            dispatcher = EventDispatcher(host, loggers, self.plan.to_dict(), directory.path)
            if resume is not None:
                step = 0 if checkpoint is None else checkpoint.step
                directory.rewind(step)
                dispatcher.rewind_to(step)
            packages = versions(host.backend(self.plan.backend).packages)
            directory.write_start(spec, self.plan, packages)
            cleanup.enter_context(dispatcher)
            show = cleanup.enter_context(_display(self.plan, directory.path, ranks, options))
            restarts = Restarts(
                self.resolved, self.plan, directory, checkpoint, options.get("max_restarts", 0)
            )

            log = _event_log(self.plan)
            checkpoints = [] if checkpoint is None else [(checkpoint.step, checkpoint.location)]

            def on_event(event: Event) -> str | None:
                if isinstance(event, CheckpointSaved):
                    checkpoints.append((event.done, event.location))
                if isinstance(event, MembersChanged) and event.done < restarts.steps_done:
                    directory.rewind(event.done)
                    dispatcher.rewind_to(event.done)
                restarts.note_steps(event)
                answer = show(event)
                log(event)
                dispatcher.dispatch(event)
                return answer

            for text in self.plan.warnings:
                warned = Warned(time=time.time(), text=text)
                directory.append_event(warned)
                on_event(warned)
            while True:
                try:
                    returned = run_job(
                        self.work,
                        spec,
                        restarts.plan,
                        host,
                        directory,
                        on_event=on_event,
                        first_port=options.get("port"),
                        resume=restarts.location,
                        interface=options.get("interface"),
                        launcher=launcher,
                        may_stop=options.get("on_event") is not None,
                    )
                    break
                except (NotANumberError, EndedError):
                    raise
                except KeyboardInterrupt as interrupt:
                    _record_interrupt(interrupt, directory, checkpoints)
                    raise
                except RunFailedError as failure:
                    restarted = restarts.restart(failure)
                    if restarted is None:
                        raise
                    directory.rewind(restarted.from_step)
                    dispatcher.rewind_to(restarted.from_step)
                    directory.append_event(restarted)
                    on_event(restarted)
            return conclude(RunOutcome(returned, directory, dispatcher, restarts.records))


def _record_interrupt(
    interrupt: KeyboardInterrupt, directory: RunDirectory, checkpoints: Sequence[tuple[int, str]]
) -> None:
    """Adds what is left of an interrupted run to the exception, to its events and to the log of rank 0."""
    lines = [f"run directory: {directory.path}"]
    if kept := last_weights_file(directory.path):
        lines.append(f"the weights so far: {kept}")
    if checkpoints:
        step, location = checkpoints[-1]
        lines.append(f"the last checkpoint: after step {step}, {location}")
        lines.append(f"to go on: isotrain resume {directory.path}")
    else:
        lines.append(
            "There is no checkpoint to go on from: the spec's `checkpoint` says when to save one."
        )
    interrupt.add_note("\n".join(lines))
    with contextlib.suppress(OSError):  # the interrupt itself is what must be reported
        ended = "the run was interrupted; lost connections above are the consequence"
        directory.append_output(f"isotrain: {ended}\n")
        directory.append_event(LauncherNote(time=time.time(), text="\n".join([ended, *lines])))


@dataclass(frozen=True)
class NonzeroRankRun:
    """The part of a rank above 0 in a run whose processes were started from outside.

    Attributes:
        work: Called on every process with its session.
        plan: Plan of the run.
        workers: Worker group of this process.
    """

    work: Work
    plan: Plan
    workers: WorkerGroup

    def run(self, conclude: Conclude[_Result]) -> _Result:
        """Runs `work` on this rank, and returns what `conclude` makes of the outcome.

        Raises:
            IsotrainError: The run has failed; says how.
        """
        from isotrain.core.rendezvous.nonzero_rank import run_nonzero_rank  # it imports NumPy

        job = Job(self.work, self.workers.resolved_spec.spec, self.plan, b"", selection.current())
        returned, directory = run_nonzero_rank(self.workers, job)
        return conclude(RunOutcome(returned, RunDirectory(Path(directory))))


def prepare(
    work: Work, spec: SpecLike, backend: str | None, options: RunOptions
) -> RunController | NonzeroRankRun:
    """Resolves a run, and starts nothing.

    If a scheduler or launcher has started this process as a rank, all ranks meet first. Collective then.

    Args:
        work: Called on every process with its session.
        spec: Training spec.
        backend: As for `run`.
        options: Options of the run.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
    """
    replace_closed_streams()
    replicas, interface = options.get("replicas"), options.get("interface")
    launcher = LauncherChoice(
        options.get("launcher") or LOCAL, options.get("launcher_options") or {}
    )
    cluster = None if launcher.name != LOCAL else detect_cluster_info()
    if cluster is None:
        resolved = ResolvedSpec(*_load(spec))
        plan = make_plan(resolved, backend=backend, replicas=replicas, launcher=launcher)
        require_interface_used(interface, plan)
        require_startable(resolved.plugins.launcher(plan.launcher, plan.launcher_options))
        return RunController(work, resolved, plan, options)
    from isotrain.core.rendezvous.worker_group import join_worker_group  # it imports NumPy

    _require_no_restarts(options.get("max_restarts", 0), cluster)
    workers = join_worker_group(
        cluster,
        lambda: _load(spec),
        backend=backend,
        replicas=replicas,
        port=options.get("port"),
        interface=interface,
    )
    resolved = workers.resolved_spec
    with workers.rendezvous.broadcasting_errors():
        plan = make_plan(
            resolved,
            backend=backend,
            replicas=replicas,
            launcher=launcher,
            resources=ClusterResources(workers.layout),
        )
    if workers.rank > 0:
        return NonzeroRankRun(work, plan, workers)
    return RunController(work, resolved, plan, options, workers)


def _rank_zero_launcher(workers: WorkerGroup, cleanup: contextlib.ExitStack) -> JobLauncher:
    """Rank 0's launcher; until `cleanup` is closed, errors of rank 0 are sent to the other ranks."""
    from isotrain.core.rendezvous.rank_zero import RankZeroLauncher  # it imports NumPy

    cleanup.enter_context(workers.rendezvous.broadcasting_errors())
    return RankZeroLauncher(workers)


def _load(spec: SpecLike) -> tuple[TrainingSpec, PluginManager]:
    loaded = load_spec(spec)
    return loaded, plugin_manager(loaded.plugins)


def _require_no_restarts(max_restarts: int, cluster: ClusterInfo) -> None:
    if max_restarts:
        raise PlanError(
            f"max_restarts: this process was started by {cluster.environment}, which alone can start it"
            f" again. Ask it to, and say --resume auto (resume= in Python). {explain_rank(cluster)}"
        )


class _UserListener:
    """A user's `on_event` as a callback; once that has returned `STOP`, this returns it for each event."""

    def __init__(self, on_event: OnPlainEvent) -> None:
        self._on_event = on_event
        self._stops = False

    def __call__(self, event: Event) -> str | None:
        answer = self._on_event(event.to_dict())
        self._stops |= isinstance(answer, str) and answer == STOP
        return STOP if self._stops else None


@contextlib.contextmanager
def _display(
    plan: Plan, directory: Path, ranks: Sequence[int], options: RunOptions
) -> Iterator[OnEvent]:
    """Shows the events of a run and the output of chosen ranks, by a user's function or on the screen."""
    display: contextlib.AbstractContextManager[OnEvent]
    on_event = options.get("on_event")
    if on_event is not None:
        display = contextlib.nullcontext(_UserListener(on_event))
    elif options.get("quiet"):
        display = contextlib.nullcontext(lambda event: None)
    else:
        from isotrain.core.reporting.display_thread import threaded_display
        from isotrain.core.reporting.progress import automatic

        display = threaded_display(
            automatic(plan, directory, verbose=options.get("verbose", False))
        )
    with display as show_event, shown_ranks(directory, ranks, show_event) as show:
        yield show


def _is_trouble(event: Event) -> bool:
    """Whether an event is logged as a warning."""
    if isinstance(event, MembersChanged):
        return bool(event.lost)
    return isinstance(event, Restarted | Warned | WorkerLost)


def _event_log(plan: Plan) -> Callable[[Event], None]:
    """Logs the events of a run; what displays show as a line of its own is text, all else of level DEBUG."""
    from isotrain.core.reporting.progress import RunProgress

    state = RunProgress(plan, every_epoch=True)

    def log(event: Event) -> None:
        line = state.note(event)
        if line is not None:
            _LOG.log(logging.WARNING if _is_trouble(event) else logging.INFO, "%s", line)
        elif _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("%s", event.to_dict())

    return log


@contextlib.contextmanager
def shown_ranks(folder: Path, ranks: Sequence[int], show: OnEvent) -> Iterator[OnEvent]:
    """Context in which the output of selected ranks is passed to a listener as it is written.

    Args:
        folder: Run directory with the logs of the ranks.
        ranks: Ranks whose output to show.
        show: Listener for every event and for the output; called by one thread at a time.

    Yields:
        Listener for the run's events, which passes them to `show`; without rank 0's output, if not selected.
    """
    others = [rank for rank in dict.fromkeys(ranks) if rank != 0]
    lock = threading.Lock()

    def on_event(event: Event) -> str | None:
        if isinstance(event, Output) and event.rank not in ranks:
            return None
        with lock:
            return show(event)

    with _follow_logs(folder, others, on_event) if others else contextlib.nullcontext():
        yield on_event


@contextlib.contextmanager
def _follow_logs(folder: Path, ranks: Sequence[int], on_event: OnEvent) -> Iterator[None]:
    tails = {rank: LogTail(rank_log(folder, rank), from_start=False) for rank in ranks}

    def follow() -> None:
        for rank, tail in tails.items():
            _send_output(rank, tail.lines(), on_event)

    try:
        with repeated(follow, _POLL_SECONDS, "shown ranks"):
            yield
    finally:
        for rank, tail in tails.items():
            _send_output(rank, tail.rest(), on_event)


def _send_output(rank: int, lines: Sequence[str], on_event: OnEvent) -> None:
    if lines:
        on_event(Output(rank=rank, text="".join(lines)))


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
                f"ranks: {rank} is no rank of this run; expected 0 to {count - 1}: it has"
                f" {counted(count, 'process')}."
            )
    return ranks


def _require_same_run(checkpoint: Checkpoint | None, spec: TrainingSpec, plan: Plan) -> None:
    """Refuses a checkpoint of another run before anything is touched."""
    if checkpoint is not None:
        from isotrain.core.session.checkpointing import resume_check

        resume_check.changes(resume_check.SavedRun(checkpoint), spec, plan)
