"""The local launcher: starts and supervises all rank processes on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import OnEvent, with_stop
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.launcher import LOCAL, Launcher
from isotrain.core.contracts.membership import newcomer_context
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import LOCALHOST, VARIABLE, ProcessContext
from isotrain.core.errors import IsotrainError, RunFailedError
from isotrain.core.launching.forkserver.process_starter import ProcessStarter
from isotrain.core.launching.processes.orphan_guard import OrphanGuard
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.launching.processes.rank_process import RankProcess, terminate_all, wait_for_exit
from isotrain.core.launching.supervision.checkpoint_on_signal import checkpoint_on_signals
from isotrain.core.launching.supervision.elastic_members import ElasticMembers
from isotrain.core.launching.supervision.handover_folders import HandoverFolders
from isotrain.core.launching.supervision.join_requests import JoinRequests
from isotrain.core.launching.supervision.newcomers import Newcomers
from isotrain.core.launching.supervision.supervisor import Supervisor
from isotrain.core.system.pickling import Payload

_EXIT_SECONDS = 5.0


class LocalLauncher(Launcher):
    """Launcher that starts every rank on this machine."""

    name = LOCAL
    summary = "processes on this machine"
    _started_ranks: int | None = None
    """Number of ranks that are started, from 0 on; None: all."""

    def why_not_elastic(self) -> str | None:
        return None

    def launch(
        self, job: Job, directory: Path, *, on_event: OnEvent, first_port: int | None = None
    ) -> list[Any]:
        refuse_nesting()
        # first: the fork server imports while the rest is prepared
        starter = ProcessStarter(job.plan, on_event)
        with contextlib.ExitStack() as cleanup:
            ports = cleanup.enter_context(contextlib.closing(Ports()))
            started = self._started_ranks
            taken = ports.take(started or job.plan.ports, first_port)
            contexts = process_contexts(job.plan, taken, directory)[:started]
            processes = [RankProcess(context) for context in contexts]
            cleanup.callback(_close_all, processes)
            if job.spec.checkpoint is not None:
                cleanup.enter_context(checkpoint_on_signals(processes))
            payload = cleanup.enter_context(contextlib.closing(Payload(job, directory)))
            guard = cleanup.enter_context(contextlib.closing(OrphanGuard()))
            cleanup.callback(terminate_all, processes)
            for process in processes:
                guard.watch(process.start(starter, payload))
            listener = with_stop(on_event, _stop(processes))
            members = None
            if job.spec.elastic is not None:
                pool = _ProcessPool(contexts[0], processes, ports, starter, payload, guard)
                members = _elastic_members(job, directory, pool, ports, listener)
                cleanup.callback(members.close)
            finished = _watch(processes, job, listener, members)
            # late, because it imports NumPy
            from isotrain.core.launching.run_directory.return_values import load_value

            return [load_value(directory, f"rank-{rank}-returned") for rank in finished]


def _close_all(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        process.close()


@dataclass(frozen=True)
class _ProcessPool:
    """The rank processes of an elastic run, which come and go.

    Attributes:
        first: Process context of rank 0 at the start.
        processes: The processes that have not been retired; changed in place.
        ports: Ports of this machine.
        starter: Starts processes.
        payload: Pickled job.
        guard: Watchdog of the processes.
    """

    first: ProcessContext
    processes: list[RankProcess]
    ports: Ports
    starter: ProcessStarter
    payload: Payload
    guard: OrphanGuard

    def start(self, rank: int, request: object) -> RankProcess:
        """Starts a process that is to join the run, in the same way for a request as for none.

        Raises:
            RunFailedError: It cannot be started.
        """
        (port,) = self.ports.take(1)
        context = newcomer_context(self.first, rank, LOCALHOST, (LOCALHOST, port))
        process = RankProcess(context)
        self.processes.append(process)
        try:
            self.guard.watch(process.start(self.starter, self.payload))
        except RunFailedError:
            self.retire(process)
            raise
        return process

    def retire(self, process: RankProcess) -> None:
        """Frees what a process holds that has ended."""
        if process.pid is not None:
            self.guard.forget(process.pid)
        self.processes.remove(process)
        process.close()
        self.ports.release(process.context.address[1])


def _elastic_members(
    job: Job, directory: Path, pool: _ProcessPool, ports: Ports, on_event: OnEvent
) -> ElasticMembers:
    elastic = job.spec.elastic
    assert elastic is not None
    requests = JoinRequests(directory)
    newcomers = Newcomers(elastic, job.plan.replicas, pool.start, requests, on_event)
    return ElasticMembers(elastic.min, ports, newcomers, pool.retire, HandoverFolders())


def _stop(processes: Sequence[RankProcess]) -> Callable[[], None]:
    """Function that requests an early end of training from all processes: any may be lost."""

    def request_stop() -> None:
        for process in processes:
            process.request_stop()

    return request_stop


def _watch(
    processes: Sequence[RankProcess], job: Job, on_event: OnEvent, members: ElasticMembers | None
) -> list[int]:
    """Supervises the processes to their end; returns the ranks with a session that have finished."""
    supervisor = Supervisor(
        processes,
        job.plan.timeouts,
        on_event,
        ignored_log_lines=job.ignored_log_lines,
        members=members,
    )
    failure = supervisor.run()
    if failure is not None:
        raise failure
    for process in processes:
        process.allow_exit()
    wait_for_exit(processes, _EXIT_SECONDS)
    supervisor.drain()
    return supervisor.finished_ranks


def process_contexts(plan: Plan, ports: Sequence[int], directory: Path) -> list[ProcessContext]:
    """The context (rank, processes, addresses) of every process.

    Args:
        plan: Plan of the run.
        ports: One port per process, then the extra ports.
        directory: Run directory.
    """
    addresses = tuple((LOCALHOST, port) for port in ports)
    count = len(plan.processes)
    local, extra = addresses[:count], addresses[count:]
    return [
        ProcessContext(
            rank, plan.replicas, str(directory), plan.processes, local, extra, plan.device_mesh
        )
        for rank in range(count)
    ]


def refuse_nesting() -> None:
    """Refuses to start a run inside of a rank process of another run.

    Raises:
        IsotrainError: This process is a rank of a run.
    """
    if VARIABLE in os.environ:
        raise IsotrainError(
            "a run was started inside of a process that belongs to a run. A module that the run"
            " imports probably calls isotrain.run when it is imported: put that call under"
            ' `if __name__ == "__main__":`.'
        )
