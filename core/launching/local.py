"""Runs a job: starts its processes, watches them, and brings back what they returned."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from isotrain.core.contracts.job import Job
from isotrain.core.contracts.launcher import Launcher
from isotrain.core.contracts.process import VARIABLE, ProcessContext
from isotrain.core.errors import IsotrainError, RunFailedError
from isotrain.core.launching.guard import Guard
from isotrain.core.launching.payload import Payload
from isotrain.core.launching.ports import Ports
from isotrain.core.launching.rank_process import RankProcess, end_all, wait_for_exit
from isotrain.core.launching.run_directory import RunDirectory
from isotrain.core.launching.supervisor import Supervisor
from isotrain.core.planning.make_plan import Plan

_EXIT_SECONDS = 5.0

OnEvent = Callable[[Mapping[str, Any]], None]


class LocalLauncher(Launcher):
    """Starts every process on this machine."""

    name = "local"
    summary = "processes on this machine"

    def launch(
        self,
        job: Job,
        directory: RunDirectory,
        *,
        on_event: OnEvent,
        first_port: int | None = None,
    ) -> list[Any]:
        return launch_local(job, directory, on_event=on_event, first_port=first_port)


def launch_local(
    job: Job, directory: RunDirectory, *, on_event: OnEvent, first_port: int | None = None
) -> list[Any]:
    """Runs a job in fresh processes on this machine; none of them is left when this returns.

    Args:
        job: What every process does.
        directory: Where they keep their files.
        on_event: Called here with every event, as it arrives.
        first_port: Use this port and those after it.

    Returns:
        What the job's function returned, by rank.

    Raises:
        RunFailedError: A process died, raised, or fell silent, or the run's files cannot be written.
        PlanError: A port that was asked for is in use.
        IsotrainError: The job cannot be sent to other processes.
    """
    refuse_nesting()
    with contextlib.ExitStack() as cleanup:
        ports = cleanup.enter_context(contextlib.closing(Ports()))
        addresses = ports.take(job.plan.ports, first_port)
        processes = [RankProcess(context) for context in contexts(job.plan, addresses, directory)]
        for process in processes:
            cleanup.callback(process.close)
        with _writing(directory):
            payload = cleanup.enter_context(contextlib.closing(Payload(job, directory.path)))
        guard = cleanup.enter_context(contextlib.closing(Guard()))
        cleanup.callback(end_all, processes)
        with _writing(directory):
            for process in processes:
                guard.watch(process.start(job.plan.environment, payload))
        _watch(processes, job, directory, on_event)
        from isotrain.core.launching.returned import (
            load_value,  # after the start, which need not wait for it
        )

        with _writing(directory):
            return [
                load_value(directory.path, f"rank-{process.rank}-returned")
                for process in job.plan.processes
                if process.has_session
            ]


def _watch(
    processes: Sequence[RankProcess], job: Job, directory: RunDirectory, on_event: OnEvent
) -> None:
    def record(event: Mapping[str, Any]) -> None:
        with _writing(directory):
            _write(event, processes[0], directory)
        on_event(event)

    supervisor = Supervisor(processes, job.plan.timeouts, record)
    failure = supervisor.run()
    if failure is not None:
        with contextlib.suppress(OSError):  # the failure itself is what has to be told
            directory.append_event({"event": "run failed", "time": time.time(), "message": failure})
        raise RunFailedError(failure)
    wait_for_exit(processes, _EXIT_SECONDS)
    supervisor.drain()


def _write(event: Mapping[str, Any], main: RankProcess, directory: RunDirectory) -> None:
    """Keeps an event in the run directory; output goes to the log of rank 0."""
    if event["event"] == "output":
        with main.log.open("a", encoding="utf-8") as log:
            log.write(event["text"])
    elif event["event"] not in ("progress", "steps"):
        directory.append_event(event)


@contextlib.contextmanager
def _writing(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailedError(
            f"the run's files in {directory.path} cannot be written or read: {error}. The run was"
            " ended. Make room there, or choose another place with --run-dir (run_directory= in"
            " Python)."
        ) from error


def contexts(
    plan: Plan, addresses: tuple[str, ...], directory: RunDirectory
) -> list[ProcessContext]:
    """Says to every process who it is."""
    return [
        ProcessContext(
            rank=process.rank,
            world_size=len(plan.processes),
            local_rank=process.local_rank,
            local_world_size=sum(p.host == process.host for p in plan.processes),
            replicas=plan.replicas,
            local_replicas=process.replicas,
            addresses=addresses,
            run_directory=str(directory.path),
            role=process.role,
        )
        for process in plan.processes
    ]


def refuse_nesting() -> None:
    """Refuses to start a run from inside of a process that belongs to one.

    Raises:
        IsotrainError: This is such a process.
    """
    if VARIABLE in os.environ:
        raise IsotrainError(
            "a run was asked for inside of a process that belongs to a run. A module that the run"
            " imports probably calls isotrain.run when it is imported: put that call under"
            ' `if __name__ == "__main__":`.'
        )
