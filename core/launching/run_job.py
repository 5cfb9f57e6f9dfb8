"""The one way to run a job: by the launcher of its plan, its events kept in the run directory."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from isotrain.core.contracts.events import Event, OnEvent, Output, Progress, RunFailed
from isotrain.core.contracts.job import Job, Work
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.run_directory.run_directory import RunDirectory, last_weights_file
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.spec.training_spec import TrainingSpec

_KEY_BYTES = 32
PROCESS_LIMIT_REACHED = (
    "the system allows this user no more processes or threads. Raise the limit (ulimit -u), or take fewer"
    " replicas or threads."
)


def is_process_limit(error: BaseException) -> bool:
    """Whether an error tells that the system allows no more processes or threads."""
    if isinstance(error, BlockingIOError):
        return not hasattr(error, "characters_written")  # which a stream that does not wait says
    return str(error) == "can't start new thread"


class JobLauncher(Protocol):
    """What runs a job in the place of a launcher."""

    def launch(
        self, job: Job, directory: Path, *, on_event: OnEvent, first_port: int | None = None
    ) -> list[Any]:
        """See `Launcher.launch`."""


def _ignored(event: Event) -> None:
    """For callers who do not listen."""


def run_job(
    work: Work,
    spec: TrainingSpec,
    plan: Plan,
    host: PluginManager,
    directory: RunDirectory,
    *,
    on_event: OnEvent = _ignored,
    first_port: int | None = None,
    resume: str | None = None,
    interface: str | None = None,
    launcher: JobLauncher | None = None,
) -> list[Any]:
    """Runs `work` on every process of a plan; none of them is left when this returns.

    Args:
        work: Called on every process with its session.
        spec: What to train.
        plan: How; its launcher starts the processes.
        host: Knows the backend and the launcher.
        directory: Where the run keeps its files, its events in `events.jsonl`.
        on_event: Called here with every event, as it arrives.
        first_port: Use this port and those after it.
        resume: A checkpoint that every session goes on from.
        interface: The network interface that an engine's ranks are told to use.
        launcher: What has started the processes, where it is not the one of the plan that is to start them.

    Returns:
        What `work` returned, by rank.

    Raises:
        RunFailedError: A process died, raised, or fell silent, or the run's files cannot be written.
        PlanError: A port that was asked for is in use.
        IsotrainError: The job cannot be sent to other processes.
    """
    plugins = selection.for_workers(selection.current(), host.installed)
    ignored_log_lines = host.backend(plan.backend).ignored_log_lines
    job = Job(
        work,
        spec,
        plan,
        secrets.token_bytes(_KEY_BYTES),
        plugins,
        resume,
        ignored_log_lines,
        interface,
    )

    untold: list[OSError] = []

    def record(event: Event) -> None:
        _keep(event, directory)
        try:
            on_event(event)
        except OSError as error:
            untold.append(error)
            raise

    with _told_as_failure(directory, untold):
        given = (
            host.launcher(plan.launcher, plan.launcher_options) if launcher is None else launcher
        )
        return given.launch(job, directory.path, on_event=record, first_port=first_port)


def _keep(event: Event, directory: RunDirectory) -> None:
    """Keeps an event in the run directory; output goes to the log of rank 0."""
    if isinstance(event, Output):
        directory.append_output(event.text)
    elif not isinstance(event, Progress):
        directory.append_event(event)


@contextlib.contextmanager
def _told_as_failure(directory: RunDirectory, untold: Sequence[OSError]) -> Iterator[None]:
    """Makes a failure to write the run's files one of the run, and notes failures in its events.

    Args:
        directory: Where the files are.
        untold: Errors of who was told of events, such as of the output; they are none of the files.
    """
    try:
        yield
    except RunFailedError as failure:
        removed = directory.removed() and f"\n{directory.removed()}"
        text = f"{failure}{removed}{_weights_so_far(directory)}"
        with contextlib.suppress(OSError):  # the failure itself is what has to be told
            directory.append_event(RunFailed(time=time.time(), message=text))
        told = type(failure)(text)
        told.steps_done, told.lost_host = failure.steps_done, failure.lost_host
        raise told from failure.__cause__
    except OSError as error:
        if error in untold:
            raise
        if is_process_limit(error):
            raise RunFailedError(PROCESS_LIMIT_REACHED) from error
        raise RunFailedError(
            f"{directory.why_unwritable(error)} The run was ended.{_weights_so_far(directory)}"
        ) from error
    except RuntimeError as error:
        if is_process_limit(error):
            raise RunFailedError(PROCESS_LIMIT_REACHED) from error
        raise


def _weights_so_far(directory: RunDirectory) -> str:
    kept = last_weights_file(directory.path)
    return f"\nthe weights so far: {kept}" if kept else ""
