"""A run as `run` and `launch` are asked for it, carried out to its end."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isotrain.core.contracts.cluster_environment import ClusterInfo, ClusterLayout
from isotrain.core.contracts.events import Event, OnEvent, OnPlainEvent
from isotrain.core.contracts.job import Job, Work
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import PlanError, RunFailedError
from isotrain.core.launching.forkserver.process_starter import start_fork_server
from isotrain.core.launching.run_directory.rank_output import shown_ranks
from isotrain.core.launching.run_directory.run_directory import RunDirectory, checkpoint_folder
from isotrain.core.launching.run_job import run_job
from isotrain.core.loggers.dispatcher import EventDispatcher
from isotrain.core.planning.cluster_environment import claim, detect_cluster_info
from isotrain.core.planning.launcher_support import require_interface_used, require_startable
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.run.restarts import RestartLoop, RunRecords
from isotrain.core.run.start import locked_run_directory, starting_checkpoint
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.standard_streams import replace_closed_streams
from isotrain.core.system.version import versions

if TYPE_CHECKING:
    from isotrain.core.checkpoints.checkpoint import Checkpoint
    from isotrain.core.rendezvous.worker_group import WorkerGroup


@dataclass(frozen=True)
class RunOutcome:
    """A run that has ended well.

    Attributes:
        returned: What `work` returned, by rank.
        directory: Where the run was.
        dispatcher: Will be told how it ended; None where another process does that.
        restarts: See `RunResult`.
    """

    returned: list[Any]
    directory: RunDirectory
    dispatcher: EventDispatcher | None = None
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, records: Mapping[str, Mapping[str, Any]], result: Any) -> None:
        """Writes the last records into the run directory, and sees to it that all others are there.

        Args:
            records: Fields by the name of their file.
            result: What the caller is about to return.

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


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What `run` and `launch` are asked for: the arguments that they share."""

    spec: SpecLike
    backend: str
    replicas: int | None
    launcher: LauncherChoice
    run_directory: str | os.PathLike[str] | None
    on_event: OnPlainEvent | None
    port: int | None
    resume: str | os.PathLike[str] | None
    max_restarts: int
    ranks: Sequence[int] | Literal["all"]
    interface: str | None = None

    def loaded(self) -> tuple[TrainingSpec, PluginManager]:
        """The spec, and the host with its plugins."""
        given = load_spec(self.spec)
        return given, plugin_manager(given.plugins)

    @contextlib.contextmanager
    def execute(self, work: Work) -> Iterator[RunOutcome]:
        """Runs `work` in processes of its own; or joins those that an engine has started with this one."""
        replace_closed_streams()
        place = None if self.launcher.name != LOCAL else detect_cluster_info()
        if place is None:
            with self._launched(work, ResolvedSpec(*self.loaded()), None) as ended:
                yield ended
            return
        from isotrain.core.rendezvous.other_ranks import run_rank  # these import NumPy
        from isotrain.core.rendezvous.worker_group import rendezvous

        self._require_no_restarts(place)
        party = rendezvous(
            place,
            self.loaded,
            backend=self.backend,
            replicas=self.replicas,
            port=self.port,
            interface=self.interface,
        )
        if party.rank == 0:
            with (
                party.rendezvous.broadcasting_errors(),
                self._launched(work, party.cast, party) as ended,
            ):
                yield ended
            return
        with party.rendezvous.broadcasting_errors():
            plan = self._planned(party.cast, party.layout, self.replicas)
        job = Job(work, party.cast.spec, plan, b"", selection.current())
        returned, directory = run_rank(party, job)
        yield RunOutcome(returned, RunDirectory(Path(directory)))

    def _require_no_restarts(self, place: ClusterInfo) -> None:
        if self.max_restarts:
            raise PlanError(
                f"max_restarts: this process was started by {place.environment}, which alone"
                " can start it again."
                f" Ask it to, and say --resume auto (resume= in Python). {claim(place)}"
            )

    @contextlib.contextmanager
    def _launched(
        self, work: Work, cast: ResolvedSpec, party: WorkerGroup | None
    ) -> Iterator[RunOutcome]:
        """Plans and launches; in the first process of a party, does its part and watches the others."""
        given, host = cast.spec, cast.host
        layout = None if party is None else party.layout
        resolved = self._planned(cast, layout, self.replicas)
        ranks = _ranks_of(resolved, self.ranks)
        if party is None:
            require_interface_used(self.interface, resolved)
            require_startable(host.launcher(resolved.launcher, resolved.launcher_options))
        loggers = [host.logger(chosen.name, chosen.options) for chosen in given.loggers]
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(
                locked_run_directory(given, self.run_directory, self.resume)
            )
            checkpoint = starting_checkpoint(given, directory, self.resume)
            _require_same_run(checkpoint, given, resolved)
            start_fork_server(resolved)  # now that nothing is refused any more: it takes longest
            dispatcher = EventDispatcher(host, loggers, resolved.to_dict(), directory.path)
            if self.resume is not None:
                step = 0 if checkpoint is None else checkpoint.step
                directory.rewind(step)
                dispatcher.rewind_to(step)
            packages = versions(host.backend(resolved.backend).packages)
            directory.write_start(given, resolved, packages)
            stack.enter_context(dispatcher)
            folder = checkpoint_folder(given, directory.path)
            with (
                self._display(resolved) as display,
                shown_ranks(directory.path, ranks, display) as show,
            ):
                records = RunRecords(directory, dispatcher, show)
                replan = functools.partial(self._smaller, cast)
                restarts = RestartLoop(
                    self.max_restarts, folder, checkpoint, records, given.min_replicas, replan
                )
                attempt = _Attempt(work, cast, directory, self.port, self.interface, party)
                returned = restarts.run(attempt, resolved)
                yield RunOutcome(returned, directory, dispatcher, restarts.restarts)

    def _planned(
        self, cast: ResolvedSpec, layout: ClusterLayout | None, replicas: int | None
    ) -> Plan:
        return make_plan(
            cast,
            backend=self.backend,
            replicas=replicas,
            launcher=self.launcher,
            layout=layout,
        )

    def _smaller(self, cast: ResolvedSpec, plan: Plan, lost_host: str | None) -> Plan:
        """A plan without a host that was lost, or with fewer replicas."""
        if lost_host is None:
            return self._with_fewer(cast, plan.replicas)
        options = plan.launcher_options or {}
        changes = cast.host.launcher(plan.launcher, options).without(lost_host)
        others = LauncherChoice(plan.launcher, {**options, **changes})
        return make_plan(cast, backend=self.backend, replicas=None, launcher=others)

    def _with_fewer(self, cast: ResolvedSpec, replicas: int) -> Plan:
        """The plan with the most replicas below a number: a strategy may not take every one."""
        for count in range(replicas - 1, 1, -1):
            with contextlib.suppress(PlanError):
                return self._planned(cast, None, count)
        return self._planned(cast, None, 1)

    def _display(self, plan: Plan) -> contextlib.AbstractContextManager[Callable[[Event], None]]:
        on_event = self.on_event
        if on_event is not None:
            return contextlib.nullcontext(lambda event: on_event(event.to_dict()))
        from isotrain.core.reporting.display_thread import threaded_display
        from isotrain.core.reporting.progress import automatic

        return threaded_display(automatic(plan))


@dataclass(frozen=True)
class _Attempt:
    """Runs all processes of a plan once, from a checkpoint or from the start."""

    work: Work
    cast: ResolvedSpec
    directory: RunDirectory
    port: int | None
    interface: str | None
    party: WorkerGroup | None

    def __call__(self, plan: Plan, start: str | None, on_event: OnEvent) -> list[Any]:
        launcher = None
        if self.party is not None:
            from isotrain.core.rendezvous.rank_zero import RankZeroLauncher

            launcher = RankZeroLauncher(self.party)
        return run_job(
            self.work,
            self.cast.spec,
            plan,
            self.cast.host,
            self.directory,
            on_event=on_event,
            resume=start,
            first_port=self.port,
            interface=self.interface,
            launcher=launcher,
        )


def _ranks_of(plan: Plan, asked: Sequence[int] | Literal["all"]) -> Sequence[int]:
    """Those that were asked for.

    Raises:
        PlanError: The run has not all of them, or they are given as another text than `all`.
    """
    count = len(plan.processes)
    if isinstance(asked, str) and asked != "all":
        raise PlanError(
            f"ranks: expected 'all' or a sequence of numbers, such as [0, 1]; received {asked!r}."
        )
    ranks = range(count) if isinstance(asked, str) else asked
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
