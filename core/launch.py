"""Runs a job: starts its processes, watches them, and brings back what they returned."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from isotrain.core.environment import VARIABLE, ProcessContext
from isotrain.core.errors import IsotrainError, RunFailedError
from isotrain.core.job import Job, load_value
from isotrain.core.plan import Plan
from isotrain.core.processes import Ports, RankProcess, end_all, wait_for_exit
from isotrain.core.rundir import RunDirectory
from isotrain.core.supervise import Supervisor

_EXIT_SECONDS = 5.0

OnEvent = Callable[[Mapping[str, Any]], None]


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
        RunFailedError: A process died, raised, or fell silent.
        PlanError: A port that was asked for is in use.
    """
    _refuse_nesting()
    payload = cloudpickle.dumps(job)
    ports = Ports()
    processes: list[RankProcess] = []
    try:
        addresses = ports.take(len(job.plan.processes), first_port)
        for context in contexts(job.plan, addresses, directory):
            processes.append(RankProcess(context, job.plan.environment, payload))
        _watch(processes, job, directory, on_event)
    finally:
        end_all(processes)
        for process in processes:
            process.close()
        ports.close()
    return [load_value(directory.path, f"rank-{p.context.rank}-returned") for p in processes]


def _watch(
    processes: list[RankProcess], job: Job, directory: RunDirectory, on_event: OnEvent
) -> None:
    def record(event: Mapping[str, Any]) -> None:
        if event["event"] not in ("progress", "output"):
            directory.append_event(event)
        on_event(event)

    failure = Supervisor(processes, job.plan.timeouts, record).run()
    if failure is not None:
        directory.append_event({"event": "run failed", "time": time.time(), "message": failure})
        raise RunFailedError(failure)
    wait_for_exit(processes, _EXIT_SECONDS)


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
        )
        for process in plan.processes
    ]


def _refuse_nesting() -> None:
    if VARIABLE in os.environ:
        raise IsotrainError(
            "a run was asked for inside of a process that belongs to a run. A module that the run"
            " imports probably calls isotrain.run when it is imported: put that call under"
            ' `if __name__ == "__main__":`.'
        )
