"""Runs a job through a scheduler: submits it, follows rank 0's output, and collects result and files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from isotrain.core.contracts.events import (
    RESULT,
    CommandFailed,
    Event,
    FilePart,
    LauncherNote,
    MembersChanged,
    OnEvent,
    Output,
    event_from_dict,
    with_stop,
)
from isotrain.core.contracts.job import InternalWork, Job, PluginChoice, Work
from isotrain.core.contracts.launcher import RankCommand, Submission
from isotrain.core.contracts.plan import Plan, backend_label
from isotrain.core.errors import PlanError, RunFailedError, error_named
from isotrain.core.json_format import json_line, json_page
from isotrain.core.launching.run_directory.remote_run_files import FileReceiver, is_returned_file
from isotrain.core.launching.run_directory.run_directory import append_to_log, checkpoint_folder
from isotrain.core.launching.scheduler.scheduler_process import SchedulerProcess
from isotrain.core.planning.cluster_environment import CHOICE_VARIABLE, NONE
from isotrain.core.spec.serialization import as_plain
from isotrain.core.spec.training_spec import TrainingSpec

FOLDER = "launcher"
"""Folder in the run directory for the files of the submission, and for the launcher's log."""
_TRAINING = ("isotrain.core.worker.entry_points", "train")
"""Module and name of the entry point of `isotrain run`."""
WORK = "work"
"""Field of the internal work option with the name of the work."""
RETURNED = "returned"
"""Name of the files in which rank 0 stores the return values of internal work, by rank."""
_KEY_BYTES = 32
_LAST_LINES = 30
_FORWARDED_VARIABLES = re.compile(
    r"ISOTRAIN_(?!KEY$|SPEC$|PROCESS$)\w+|PYTHONPATH|KERAS_HOME|OMP_NUM_THREADS"
)
_MAX_BYTES = 120_000
"""Largest spec in an environment variable, or work in an argument; Linux allows 128 KiB."""


class Scheduler(Protocol):
    """Part of `SchedulerLauncher` that builds submissions."""

    name: ClassVar[str]

    def submission(self, command: RankCommand) -> Submission:
        """Builds the submission of a run."""

    def replacement(self, command: RankCommand) -> Submission | None:
        """Builds the submission of a process in place of a lost one; None: it is not replaced."""


def run_on_scheduler(
    scheduler_launcher: Scheduler, job: Job, directory: Path, on_event: OnEvent
) -> list[Any]:
    """Runs a training or internal work through a scheduler.

    Args:
        scheduler_launcher: Builds the submissions.
        job: Job to run.
        directory: Run directory.
        on_event: Called with every event of rank 0.

    Returns:
        Return values by rank; of a training only that of rank 0.

    Raises:
        PlanError: The scheduler cannot run this job.
        RunFailedError: The run failed, on any rank.
    """
    launcher = scheduler_launcher.name
    work_options = _work_options(launcher, job.work)
    # only a training saves checkpoints
    spec = job.spec.replace(checkpoint=None) if work_options else job.spec
    command = rank_command(spec, job.plan, job.plugins, directory, job.resume, job.interface)
    command = replace(command, options=(*command.options, *work_options))
    submission = scheduler_launcher.submission(command)
    write(submission, command)
    if not submission.commands:
        raise PlanError(
            f"{launcher}: isotrain only writes the files to submit, and starts nothing. Run"
            f" {' and '.join(manual_commands(submission, command))}."
        )
    log = command.spec.with_name("launcher.log")
    marker = command.spec.with_name(command.name)  # see `launcher_sees_folder`
    marker.touch()
    for process in job.plan.processes:
        append_to_log(directory, process.rank, "")
    try:
        with (
            SchedulerProcess(submission, log, environment_for(submission, command)) as scheduler,
            contextlib.closing(
                _Replacements(scheduler_launcher, command, log, on_event)
            ) as replacements,
        ):
            listen = _noting_stop(replacements.note, launcher)
            last_event = _follow(scheduler, command.name, directory, listen)
            status = 0 if "event" in last_event else scheduler.status()
    finally:
        marker.unlink()
        _move_files(command.run_directory, directory)
    if "event" not in last_event:
        raise RunFailedError(_describe_missing_result(launcher, status, log))
    _raise_if_error(last_event)
    values = _load_returned(directory) if isinstance(job.work, InternalWork) else [last_event]
    return [_result(each, job.plan) for each in values]


def _noting_stop(on_event: OnEvent, launcher: str) -> OnEvent:
    """A callback that notes once that a request to stop does not reach the ranks."""
    texts = [
        f"on_event returned 'stop', which ranks that {launcher} starts do not get: the run goes on"
    ]

    def note() -> None:
        if texts:
            on_event(LauncherNote(time=time.time(), text=texts.pop()))

    return with_stop(on_event, note)


class _Replacements:
    """Starts processes in place of those that an elastic run has lost."""

    def __init__(
        self,
        launcher: Scheduler,
        command: RankCommand,
        log: Path,
        on_event: OnEvent,
    ) -> None:
        """Starts none yet.

        Args:
            launcher: Builds the submission of each.
            command: Command of every rank of the run.
            log: File for standard error of the commands.
            on_event: Listener of the run's events.
        """
        self._launcher = launcher
        self._left_over = command.replacements
        self._command = command
        self._log = log
        self._on_event = on_event
        self._started: list[SchedulerProcess] = []

    def note(self, event: Event) -> str | None:
        """Passes an event on; starts a process for each one that is lost, while some are left over."""
        answer = self._on_event(event)
        if isinstance(event, MembersChanged):
            for _ in range(min(self._left_over, len(event.lost))):
                self._left_over -= 1
                self._start()
        return answer

    def _start(self) -> None:
        command = self._command.joining(f"{self._command.name}-{len(self._started) + 1}")
        try:
            submission = self._launcher.replacement(command)
            if submission is not None:
                variables = environment_for(submission, command)
                self._started.append(SchedulerProcess(submission, self._log, variables))
        except PlanError as error:
            text = f"no process can be started in place of a lost one: {error}"
            self._on_event(LauncherNote(time=time.time(), text=text))

    def close(self) -> None:
        """Ends those that have not ended with the run, such as ones that wait for a free host."""
        for process in self._started:
            process.__exit__()


def _work_options(launcher: str, work: Work) -> tuple[str, ...]:
    """Options that make `isotrain run` do internal work; empty for a training.

    Raises:
        PlanError: It is a custom loop, or too long for an argument.
    """
    if isinstance(work, InternalWork):
        text = json_line({WORK: work.name, **work.fields()}, default=None)
        _require_short(f"the work {work.name!r}", text, "Have it name fewer tensors in its map.")
        return ("--internal-work", text)
    if (work.__module__, getattr(work, "__name__", None)) != _TRAINING:
        raise PlanError(
            f"launcher {launcher!r}: your own loop cannot be sent to other hosts. Start its script with"
            f" {launcher} itself, once per rank: isotrain.launch then connects the ranks."
        )
    return ()


def _load_returned(directory: Path) -> list[dict[str, Any]]:
    """Return values of internal work, by rank.

    Raises:
        RunFailedError: Rank 0's file has not arrived.
    """
    from isotrain.core.launching.run_directory.return_values import load_value  # imports NumPy

    try:
        values: list[dict[str, Any]] = load_value(directory, RETURNED)
    except OSError as error:
        raise RunFailedError(f"the return values of the ranks did not arrive: {error}.") from error
    return values


def rank_command(
    spec: TrainingSpec,
    plan: Plan,
    plugins: PluginChoice,
    directory: Path,
    resume: str | None,
    interface: str | None = None,
) -> RankCommand:
    """Builds the command that a scheduler starts on every rank.

    Args:
        spec: Training spec.
        plan: Plan of the run.
        plugins: Requested and blocked plugins.
        directory: Run directory.
        resume: Checkpoint from which to resume; None: none.
        interface: Requested network interface; None: automatic.

    Raises:
        PlanError: The spec has an object that cannot be named as `module:name`.
    """
    folder = directory / FOLDER
    name, backend = _run_name(plan.run), backend_label(plan.backend, plan.requested_collective)
    options = ["--backend", backend, "--json", "--line-prefix", name]
    if len(plan.processes) == 1:
        # a single process has no rendezvous that would tell it the number of replicas
        options += ["--replicas", str(plan.replicas)]
    elif interface is not None:
        options += ["--interface", interface]
    if resume is not None:
        options += ["--resume", resume]
    for plugin in plugins.requested:
        options += ["--plugin", plugin]
    for blocked in plugins.blocked:
        options += ["--block-plugin", blocked]
    return RankCommand(
        name=name,
        spec=folder / "spec.json",
        spec_text=json_page(as_plain(_spec_for_ranks(spec, directory))),
        options=tuple(options),
        run_directory=_new_start_folder(folder),
        variables={name: os.environ[name] for name in filter(_is_forwarded, os.environ)},
        key=secrets.token_hex(_KEY_BYTES),
        follow_options=("--ranks", "all", "--return-files"),
        fewest_processes=_fewest_processes(spec, plan),
        replacements=0 if spec.elastic is None else spec.elastic.replacements,
    )


def _fewest_processes(spec: TrainingSpec, plan: Plan) -> int | None:
    """Number of processes of `min_replicas` replicas, with all stages or parts; None without a minimum."""
    if spec.min_replicas is None:
        return None
    removable = (plan.replicas - spec.min_replicas) * plan.device_mesh.positions_per_replica
    return max(1, len(plan.processes) - removable)


def _is_forwarded(name: str) -> bool:
    """Whether an environment variable of this process is passed to the ranks."""
    return not _disables_cluster(name) and _FORWARDED_VARIABLES.fullmatch(name) is not None


def _disables_cluster(name: str) -> bool:
    """Whether a variable turns off the cluster environment of this process, which ranks need."""
    return name == CHOICE_VARIABLE and os.environ[name].strip() == NONE


def _spec_for_ranks(spec: TrainingSpec, directory: Path) -> TrainingSpec:
    """The spec for ranks: without loggers, which run here, and with the checkpoint folder resolved."""
    if spec.checkpoint is None:
        return spec.replace(loggers=[])
    folder = checkpoint_folder(spec, directory)
    return spec.replace(
        loggers=[], checkpoint=spec.checkpoint.model_copy(update={"folder": folder})
    )


def _new_start_folder(folder: Path) -> Path:
    """Rank 0's run directory: a new folder for each start of a run."""
    numbers = itertools.count(1)
    return next(path for n in numbers if not (path := folder / f"start-{n}").exists())


def write(submission: Submission, command: RankCommand) -> list[Path]:
    """Writes the spec and the submission's files with mode 0600; returns the paths of the latter."""
    command.spec.parent.mkdir(parents=True, exist_ok=True)
    files = _files(submission, command)
    for path, text in [(command.spec, command.spec_text), *files.items()]:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _files(submission: Submission, command: RankCommand) -> dict[Path, str]:
    return {command.spec.with_name(name): text for name, text in submission.files.items()}


def manual_commands(submission: Submission, command: RankCommand) -> list[str]:
    """Commands, as shell text, by which a user submits the files of a submission."""
    return [
        shlex.join([*program, str(command.spec.with_name(name))])
        for name, program in submission.submit_with.items()
    ]


def _run_name(run: str) -> str:
    """Unique name of a run that SLURM and Kubernetes accept."""
    readable = re.sub(r"[^a-z0-9]+", "-", f"isotrain-{run}".lower())[:40].strip("-")
    return f"{readable}-{secrets.token_hex(3)}"


def environment_for(submission: Submission, command: RankCommand) -> dict[str, str]:
    """The complete environment of a submission's commands.

    Raises:
        PlanError: The spec is too long for an environment variable.
    """
    secret = command.secret_variables
    remedy = "Have the functions that it names create its long parts."
    _require_short("the spec", secret[command.spec_variable], remedy)
    if not submission.key_in_environment:
        del secret[command.key_variable]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != RankCommand.key_variable and not _disables_cluster(name)
    }
    return {**inherited, **submission.variables, **secret}


def _require_short(what: str, text: str, remedy: str) -> None:
    if len(text) > _MAX_BYTES:
        raise PlanError(
            f"{what} has {len(text)} bytes as JSON, and at most {_MAX_BYTES} can be sent to processes that"
            f" a scheduler starts. {remedy}"
        )


def _follow(
    scheduler: SchedulerProcess, line_prefix: str, directory: Path, on_event: OnEvent
) -> dict[str, Any]:
    """Passes on rank 0's events; returns its result or error event, or an empty dict.

    Args:
        scheduler: Commands whose output to follow.
        line_prefix: Prefix of isotrain's own lines; others are output of the ranks and the scheduler.
        directory: Run directory, for the logs of other ranks and for files from rank 0.
        on_event: Called with every event.
    """
    last: dict[str, Any] = {}
    files = FileReceiver(directory)
    for line in scheduler.lines():
        fields = _parse_event(line, line_prefix)
        if fields is None:
            on_event(Output(text=line))
        elif fields["event"] in (RESULT, CommandFailed.kind):
            last = last or fields
            scheduler.expect_end()
        elif isinstance(event := event_from_dict(fields), FilePart):
            files.take(event)
        elif isinstance(event, Output) and event.rank:
            append_to_log(directory, event.rank, event.text)
        elif event is not None:
            on_event(event)
    files.close(lambda text: on_event(LauncherNote(time=time.time(), text=text)))
    return last


def _parse_event(line: str, line_prefix: str) -> dict[str, Any] | None:
    """The event of a line of isotrain; None for other lines. Launchers may put the rank before a line."""
    _, prefix, text = line.partition(f"{line_prefix} ")
    if not prefix:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "event" in fields else None


def _raise_if_error(fields: Mapping[str, Any]) -> None:
    """Raises the error of rank 0 again."""
    event = event_from_dict(fields)
    if isinstance(event, CommandFailed):
        error = error_named(event.error, event.message)
        if isinstance(error, RunFailedError):
            error.lost_host = event.lost_host
        raise error


def _result(fields: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Rank 0's result, with the launcher of this process's plan; the rest of its plan is that of its host."""
    result = {name: value for name, value in fields.items() if name != "event"}
    launcher = {"launcher": plan.launcher, "launcher_options": dict(plan.launcher_options or {})}
    return {**result, "plan": {**result["plan"], **launcher}}


def _describe_missing_result(launcher: str, status: int, log: Path) -> str:
    """The message if the commands ended before rank 0 reported how the run ended."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    how = f"with exit code {status}" if status >= 0 else f"by signal {-status}"
    tail = "\n".join(f"  {line}" for line in lines) or "  nothing"
    return (
        f"{launcher} ended {how}, and rank 0 did not report how the run ended. The end of its log"
        f" ({log}):\n{tail}"
    )


def _move_files(source: Path, directory: Path) -> None:
    """Moves rank 0's files into the run directory, if its folder is on a shared file system."""
    for entry in source.iterdir() if source.is_dir() else ():
        target = directory / entry.name
        if not target.exists() or (entry.is_file() and is_returned_file(entry.name)):
            os.replace(entry, target)
