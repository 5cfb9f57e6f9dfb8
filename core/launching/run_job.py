"""Runs a job with the launcher of its plan, and writes its events to the run directory."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import Any, Protocol

from isotrain.core.contracts.events import Event, OnEvent, Output, Progress, RunFailed
from isotrain.core.contracts.job import Job, Work
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import RunFailedError, ValuesNeededError
from isotrain.core.launching.run_directory.run_directory import RunDirectory, last_weights_file
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.spec.training_spec import TrainingSpec

_KEY_BYTES = 32
PROCESS_LIMIT_REACHED = (
    "the system allows this user no more processes or threads. Raise the limit (ulimit -u), or take fewer"
    " replicas or threads."
)
_THREAD_LIMIT_MESSAGES = ("can't start new thread", "Resource temporarily unavailable")
"""Messages of Python's, and of C++'s, threads that cannot start."""


def is_process_limit(error: BaseException) -> bool:
    """Whether an error of the launcher means that this user may start no more processes."""
    if isinstance(error, BlockingIOError):
        return not hasattr(error, "characters_written")  # set by a non-blocking stream
    return is_thread_limit(error)


def is_thread_limit(error: BaseException) -> bool:
    """Whether an error, also one of a user's code, means that this user may start no more threads."""
    return str(error) in _THREAD_LIMIT_MESSAGES


class JobLauncher(Protocol):
    """Runs a job in place of the plan's launcher."""

    def launch(
        self, job: Job, directory: Path, *, on_event: OnEvent, first_port: int | None = None
    ) -> list[Any]:
        """Runs a job, as `Launcher.launch`."""


def _ignore_event(event: Event) -> None:
    """Default listener."""


def run_job(
    work: Work,
    spec: TrainingSpec,
    plan: Plan,
    host: PluginManager,
    directory: RunDirectory,
    *,
    on_event: OnEvent = _ignore_event,
    first_port: int | None = None,
    resume: str | None = None,
    interface: str | None = None,
    launcher: JobLauncher | None = None,
    may_stop: bool = False,
) -> list[Any]:
    """Runs `work` on every rank of a plan; all rank processes have ended when this returns.

    Args:
        work: Function of a session, called on every rank.
        spec: Training spec.
        plan: Plan of the run; its launcher starts the processes.
        host: Plugin manager with the backend and the launcher.
        directory: Run directory; gets the events in `events.jsonl`.
        on_event: Called in this process with every event as it arrives.
        first_port: First of the consecutive ports to use; None: any that are free.
        resume: Checkpoint from which every session resumes.
        interface: Network interface that ranks started by a scheduler must use.
        launcher: Replaces the launcher of the plan where the processes are started already.
        may_stop: Whether `on_event` may return `STOP`.

    Returns:
        Return values of `work`, by rank.

    Raises:
        RunFailedError: A process died, raised, or fell silent, or the run's files cannot be written.
        PlanError: A requested port is in use.
        IsotrainError: The job cannot be sent to other processes.
    """
    plugins = selection.for_workers(selection.current(), host.installed)
    ignored_log_lines = host.backend(plan.backend).ignored_log_lines
    job = Job(
        work,
        spec,
        plan,
        secrets.token_bytes(_KEY_BYTES) if plan.uses_parameter_server else b"",
        plugins,
        resume,
        ignored_log_lines,
        interface,
        may_stop,
    )

    listener_errors: list[OSError] = []

    def record(event: Event) -> str | None:
        _keep(event, directory)
        try:
            return on_event(event)
        except OSError as error:
            listener_errors.append(error)
            raise

    try:
        job_launcher = (
            host.launcher(plan.launcher, plan.launcher_options) if launcher is None else launcher
        )
        return job_launcher.launch(job, directory.path, on_event=record, first_port=first_port)
    except (RunFailedError, OSError, RuntimeError) as error:
        failure = None if error in listener_errors else _run_failure(error, directory)
        if failure is None:
            raise
        raise failure from (error.__cause__ if isinstance(error, RunFailedError) else error)


def _keep(event: Event, directory: RunDirectory) -> None:
    """Writes an event to the run directory; output goes to the log of rank 0."""
    if isinstance(event, Output):
        directory.append_output(event.text)
    elif not isinstance(event, Progress):
        directory.append_event(event)


def _run_failure(error: Exception, directory: RunDirectory) -> RunFailedError | None:
    """The failure of a run that an error means, recorded as an event; None for another error."""
    if isinstance(error, RunFailedError):
        removed = directory.removed() and f"\n{directory.removed()}"
        text = f"{error}{removed}{_weights_so_far(directory)}"
        with contextlib.suppress(OSError):  # the failure itself is what must be reported
            directory.append_event(RunFailed(time=time.time(), message=text))
        completed = type(error)(text)
        completed.steps_done, completed.lost_host = error.steps_done, error.lost_host
        if isinstance(completed, ValuesNeededError) and isinstance(error, ValuesNeededError):
            completed.reason = error.reason
        return completed
    if is_process_limit(error):
        return RunFailedError(PROCESS_LIMIT_REACHED)
    if isinstance(error, OSError):
        return RunFailedError(
            f"{directory.why_unwritable(error)} The run was ended.{_weights_so_far(directory)}"
        )
    return None


def _weights_so_far(directory: RunDirectory) -> str:
    kept = last_weights_file(directory.path)
    return f"\nthe weights so far: {kept}" if kept else ""
