"""Has an engine start the ranks of a run, and follows the run from here."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.events import (
    RESULT,
    CommandFailed,
    FilePart,
    LauncherNote,
    OnEvent,
    Output,
    event_from_dict,
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
"""In the run directory: what the engine was given, and what it said."""
_TRAINING = ("isotrain.core.worker.entry_points", "train")
"""What `isotrain run` does with its session."""
WORK = "work"
"""Among the fields of work that ranks are told to do: its name."""
RETURNED = "returned"
"""The name of the files in which rank 0 leaves what such work returned, by rank."""
_KEY_BYTES = 32
_LAST_LINES = 30
_HANDED_ON = re.compile(
    r"ISOTRAIN_(?!KEY$|SPEC$|PROCESS$)\w+|PYTHONPATH|KERAS_HOME|OMP_NUM_THREADS"
)
_MOST_BYTES = 120_000
"""Of a spec in a variable, or of work in an argument; Linux takes 128 KiB."""

Submit = Callable[[RankCommand], Submission]
"""Says what is given to an engine."""


def run_on_scheduler(
    launcher: str, submit: Submit, job: Job, directory: Path, on_event: OnEvent
) -> list[Any]:
    """Runs a job on an engine: of `isotrain.run`, or one whose work its ranks can be told.

    Args:
        launcher: The engine's, by name.
        submit: Of the engine.
        job: What to do.
        directory: Of the run.
        on_event: Called with every event of rank 0.

    Returns:
        What the processes returned, by rank; of a training only what rank 0 did.

    Raises:
        PlanError: The engine cannot be given this job.
        RunFailedError: The run failed, on any rank.
    """
    asked = _work_options(launcher, job.work)
    spec = job.spec.replace(checkpoint=None) if asked else job.spec  # only training saves any
    command = rank_command(spec, job.plan, job.plugins, directory, job.resume, job.interface)
    command = replace(command, options=(*command.options, *asked))
    submission = submit(command)
    write(submission, command)
    if not submission.commands:
        raise PlanError(
            f"{launcher}: isotrain writes what it is given and does not start it: give it"
            f" {', '.join(map(str, _files(submission, command)))}."
        )
    log, seen = command.spec.with_name("launcher.log"), command.spec.with_name(command.name)
    seen.touch()
    for process in job.plan.processes:
        append_to_log(directory, process.rank, "")
    try:
        with SchedulerProcess(submission, log, environment_for(submission, command)) as engine:
            told = _follow(engine, command.name, directory, on_event)
            status = 0 if "event" in told else engine.status()
    finally:
        seen.unlink()
        _take_over(command.run_directory, directory)
    if "event" not in told:
        raise RunFailedError(_without_result(launcher, status, log))
    _raise_if_error(told)
    found = _returned(directory) if isinstance(job.work, InternalWork) else [told]
    return [_result(each, job.plan) for each in found]


def _work_options(launcher: str, work: Work) -> tuple[str, ...]:
    """What makes `isotrain run` do this work.

    Raises:
        PlanError: It is a person's own, or too long for an argument.
    """
    if isinstance(work, InternalWork):
        told = json_line({WORK: work.name, **work.fields()}, default=None)
        _require_short(f"the work {work.name!r}", told, "Have it name fewer tensors in its map.")
        return ("--internal-work", told)
    if (work.__module__, getattr(work, "__name__", None)) != _TRAINING:
        raise PlanError(
            f"launcher {launcher!r}: your own loop cannot be sent to other hosts. Start the script that has"
            " it with the engine itself: its isotrain.launch joins the others."
        )
    return ()


def _returned(directory: Path) -> list[dict[str, Any]]:
    """What the processes returned, by rank.

    Raises:
        RunFailedError: It has not arrived here.
    """
    from isotrain.core.launching.run_directory.return_values import load_value  # it imports NumPy

    try:
        found: list[dict[str, Any]] = load_value(directory, RETURNED)
    except OSError as error:
        raise RunFailedError(f"what the ranks returned did not arrive here: {error}.") from error
    return found


def rank_command(
    spec: TrainingSpec,
    plan: Plan,
    plugins: PluginChoice,
    directory: Path,
    resume: str | None,
    interface: str | None = None,
) -> RankCommand:
    """What an engine is to start on every rank.

    Args:
        spec: What to train.
        plan: How.
        plugins: Those that were asked for.
        directory: Of the run.
        resume: The checkpoint to go on from.
        interface: That was asked for, if one was.

    Raises:
        PlanError: The spec holds what cannot be told by name.
    """
    folder = directory / FOLDER
    name, backend = _engine_name(plan.run), backend_label(plan.backend, plan.requested_collective)
    options = ["--backend", backend, "--json", "--line-prefix", name]
    if len(plan.processes) == 1:
        # who is alone joins nobody that would say how many replicas there are
        options += ["--replicas", str(plan.replicas)]
    elif interface is not None:
        options += ["--interface", interface]
    if resume is not None:
        options += ["--resume", resume]
    for where in plugins.requested:
        options += ["--plugin", where]
    for blocked in plugins.blocked:
        options += ["--block-plugin", blocked]
    return RankCommand(
        name=name,
        spec=folder / "spec.json",
        spec_text=json_page(as_plain(_on_ranks(spec, directory))),
        options=tuple(options),
        run_directory=_unused(folder),
        variables={name: os.environ[name] for name in filter(_is_handed_on, os.environ)},
        key=secrets.token_hex(_KEY_BYTES),
        follow_options=("--ranks", "all", "--return-files"),
        fewest_processes=_fewest_processes(spec, plan),
    )


def _fewest_processes(spec: TrainingSpec, plan: Plan) -> int | None:
    """Those that `min_replicas` replicas take: each is as many processes as it has stages."""
    if spec.min_replicas is None:
        return None
    without = (plan.replicas - spec.min_replicas) * plan.device_mesh.size(STAGE)
    return max(1, len(plan.processes) - without)


def _is_handed_on(name: str) -> bool:
    """Whether a variable is of the ranks too."""
    return not _says_alone(name) and _HANDED_ON.fullmatch(name) is not None


def _says_alone(name: str) -> bool:
    """Whether a variable says that this process stands alone, which is not said of the ranks."""
    return name == CHOICE_VARIABLE and os.environ[name].strip() == NONE


def _on_ranks(spec: TrainingSpec, directory: Path) -> TrainingSpec:
    """What is trained, without what is done here; its checkpoints are where this process looks for them."""
    if spec.checkpoint is None:
        return spec.replace(loggers=[])
    folder = checkpoint_folder(spec, directory)
    return spec.replace(
        loggers=[], checkpoint=spec.checkpoint.model_copy(update={"folder": folder})
    )


def _unused(folder: Path) -> Path:
    """Where rank 0 keeps its files: each start of a run has a place of its own."""
    numbers = itertools.count(1)
    return next(path for n in numbers if not (path := folder / f"start-{n}").exists())


def write(submission: Submission, command: RankCommand) -> list[Path]:
    """Writes the spec and the submission's files, which nobody else may read; returns where these are."""
    command.spec.parent.mkdir(parents=True, exist_ok=True)
    files = _files(submission, command)
    for path, text in [(command.spec, command.spec_text), *files.items()]:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _files(submission: Submission, command: RankCommand) -> dict[Path, str]:
    return {command.spec.with_name(name): text for name, text in submission.files.items()}


def _engine_name(run: str) -> str:
    """One that no other run has, as SLURM and Kubernetes allow it."""
    readable = re.sub(r"[^a-z0-9]+", "-", f"isotrain-{run}".lower())[:40].strip("-")
    return f"{readable}-{secrets.token_hex(3)}"


def environment_for(submission: Submission, command: RankCommand) -> dict[str, str]:
    """All that the commands of a submission find set.

    Raises:
        PlanError: The spec is too long for a variable.
    """
    told = command.secret_variables
    shorter = "Have the long parts of it made by the functions that it names."
    _require_short("the spec", told[command.spec_variable], shorter)
    if not submission.key_in_environment:
        del told[command.key_variable]
    own = {
        name: value
        for name, value in os.environ.items()
        if name != RankCommand.key_variable and not _says_alone(name)
    }
    return {**own, **submission.variables, **told}


def _require_short(what: str, text: str, shorter: str) -> None:
    if len(text) > _MOST_BYTES:
        raise PlanError(
            f"{what} has {len(text)} bytes as JSON, and at most {_MOST_BYTES} can be told to the processes of"
            f" an engine. {shorter}"
        )


def _follow(
    engine: SchedulerProcess, mark: str, directory: Path, on_event: OnEvent
) -> dict[str, Any]:
    """Passes on what rank 0 tells; returns its result or its error, or nothing.

    Args:
        engine: To follow.
        mark: Before all that isotrain says there; the rest is what ranks and the engine print.
        directory: Of the run, for the output of the other ranks, and for files that come from rank 0.
        on_event: Called with every event.
    """
    last: dict[str, Any] = {}
    files = FileReceiver(directory)
    for line in engine.lines():
        told = _event(line, mark)
        if told is None:
            on_event(Output(text=line))
        elif told["event"] in (RESULT, CommandFailed.kind):
            last = last or told
            engine.expect_end()
        elif isinstance(event := event_from_dict(told), FilePart):
            files.take(event)
        elif isinstance(event, Output) and event.rank:
            append_to_log(directory, event.rank, event.text)
        elif event is not None:
            on_event(event)
    files.close(lambda text: on_event(LauncherNote(time=time.time(), text=text)))
    return last


def _event(line: str, mark: str) -> dict[str, Any] | None:
    """What a line tells, if isotrain has printed it; engines put before it whose line it is."""
    _, found, text = line.partition(f"{mark} ")
    if not found:
        return None
    try:
        told = json.loads(text)
    except ValueError:
        return None
    return told if isinstance(told, dict) and "event" in told else None


def _raise_if_error(told: Mapping[str, Any]) -> None:
    """Raises again what was raised on rank 0."""
    event = event_from_dict(told)
    if isinstance(event, CommandFailed):
        error = error_named(event.error, event.message)
        if isinstance(error, RunFailedError):
            error.lost_host = event.lost_host
        raise error


def _result(told: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """What rank 0 returned, with who has started it; the rest of its plan is of where it was."""
    result = {name: value for name, value in told.items() if name != "event"}
    launcher = {"launcher": plan.launcher, "launcher_options": dict(plan.launcher_options or {})}
    return {**result, "plan": {**result["plan"], **launcher}}


def _without_result(launcher: str, status: int, log: Path) -> str:
    """What to say of an engine that ended before rank 0 said how the run ended."""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    how = f"with exit code {status}" if status >= 0 else f"by signal {-status}"
    last = "\n".join(f"  {line}" for line in said) or "  nothing"
    return (
        f"{launcher} ended {how}, and rank 0 did not say how the run ended. The last that was said"
        f" ({log}):\n{last}"
    )


def _take_over(source: Path, directory: Path) -> None:
    """Moves what rank 0 has left into the run directory, where this machine sees it."""
    for entry in source.iterdir() if source.is_dir() else ():
        target = directory / entry.name
        if not target.exists() or (entry.is_file() and is_returned_file(entry.name)):
            os.replace(entry, target)
