"""Rank 0 of a run whose processes were started from outside: supervises all ranks, writes the files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import OnEvent, with_stop
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.plan import backend_label
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.launching.supervision.checkpoint_on_signal import checkpoint_on_signals
from isotrain.core.launching.supervision.elastic_members import ElasticMembers
from isotrain.core.launching.supervision.newcomers import Newcomers
from isotrain.core.launching.supervision.supervisor import Supervisor
from isotrain.core.rendezvous.crash_output import faulthandler_enabled
from isotrain.core.rendezvous.heartbeat import HeartbeatInterval, sigterm_as_exception
from isotrain.core.rendezvous.join_server import JoinServer, RemoteJoinRequest
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.remote_process import LocalProcess, RemoteProcess
from isotrain.core.rendezvous.rendezvous import RendezvousHost
from isotrain.core.rendezvous.state_exchange import StateExchange
from isotrain.core.rendezvous.worker_group import WorkerGroup, checkpoint_inode, configuration
from isotrain.core.rendezvous.worker_thread import END_SECONDS, WorkerThread
from isotrain.core.spec.import_strings import describe, is_importable
from isotrain.core.system.periodic import repeated
from isotrain.core.system.process import environ_set, exit_after_failure
from isotrain.core.system.standard_streams import enlarge_pipe
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.codec import encode_value

_STDOUT = 1
"""The file descriptor, even if `sys.stdout` is something else."""


class RankZeroLauncher:
    """Rank 0's stand-in for a launcher: all processes run already."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def launch(
        self, job: Job, directory: Path, *, on_event: OnEvent, first_port: int | None = None
    ) -> list[Any]:
        """Runs this rank's part of a job, and supervises the other ranks.

        Args:
            job: Job, the same on all ranks.
            directory: Run directory.
            on_event: Called with every event.
            first_port: Unused: the ports were chosen in the rendezvous.

        Returns:
            The return values of the job's function, by rank, for ranks with a training loop.

        Raises:
            RunFailedError: A rank died, raised, or fell silent.
        """
        rendezvous = self._group.rendezvous
        assert isinstance(rendezvous, RendezvousHost)
        assignment = self._group.exchange_plan(job, directory)
        rendezvous.close_server()
        job = replace(job, key=rendezvous.key.derive("parameter-server run"))
        reporter, channels = LocalReporter(0), rendezvous.channels
        context, exchange = assignment.context, StateExchange(0, channels)
        local = LocalProcess(reporter, context, directory)
        others = [
            RemoteProcess(
                channels[info.rank], info, context.addresses[info.rank], directory, exchange
            )
            for info in context.processes[1:]
        ]
        returned: list[Any] = []
        worker = WorkerThread(
            job, self._group.resolved_spec, context, reporter, returned.append, exchange
        )

        def begin() -> None:
            worker.begin()
            for channel in channels.values():
                channel.send({"do": "begin"})

        with _run_environment(job, reporter, channels) as cleanup:
            listener = with_stop(on_event, reporter.request_stop)
            members = None
            if job.spec.elastic is not None:
                newcomers = _RemoteNewcomers(
                    self._group, channels, job, directory, exchange, others
                )
                members = newcomers.members(listener, cleanup)
            supervisor = Supervisor(
                [local, *others],
                job.plan.timeouts,
                listener,
                begin,
                job.ignored_log_lines,
                members=members,
            )
            worker.start()
            with _broadcasting_failure(rendezvous, supervisor, worker):
                _supervise(supervisor)
                worker.join()
                finished = supervisor.finished_ranks
                remote = (each.returned for each in others if each.info.rank in finished)
                values = [*returned, *remote]
                plain, arrays = encode_value(values)
                for channel in channels.values():
                    channel.send({"do": "leave", "returned": plain}, arrays)
            rendezvous.close()
        return values


@contextlib.contextmanager
def _run_environment(
    job: Job, reporter: LocalReporter, channels: Mapping[int, Channel]
) -> Iterator[contextlib.ExitStack]:
    """Context of a run on rank 0: signal handlers, environment variables, heartbeats; yields its stack."""
    with contextlib.ExitStack() as stack:
        stack.callback(reporter.close)
        enlarge_pipe(_STDOUT)  # its reader, the launcher, may be blocked by a terminal
        stack.enter_context(faulthandler_enabled())
        stack.enter_context(sigterm_as_exception())
        if job.spec.checkpoint is not None:
            stack.enter_context(checkpoint_on_signals([reporter]))
        stack.enter_context(environ_set(job.plan.environment_variables))
        interval = HeartbeatInterval.of(len(job.plan.processes), job.plan.timeouts["silence"])
        stack.enter_context(heartbeats(reporter, channels, interval.max_seconds))
        yield stack


@dataclass(frozen=True)
class _RemoteNewcomers:
    """The processes that join an elastic run from anywhere; none is started in place of a lost one.

    Attributes:
        group: Worker group of this process.
        channels: Channels to the other ranks, by rank; changed in place.
        job: The job.
        directory: Run directory.
        exchange: Exchange of the state.
        others: The other ranks; changed in place.
    """

    group: WorkerGroup
    channels: dict[int, Channel]
    job: Job
    directory: Path
    exchange: StateExchange
    others: list[RemoteProcess]

    def members(self, on_event: OnEvent, cleanup: contextlib.ExitStack) -> ElasticMembers:
        """The members of the run, whose server is closed with `cleanup`."""
        elastic = self.job.spec.elastic
        assert elastic is not None
        elastic = elastic.model_copy(update={"replacements": 0})
        plan, (host, _) = self.job.plan, self.group.addresses[0]
        ports = cleanup.enter_context(contextlib.closing(Ports(host)))
        (port,) = ports.take(1)
        requests = JoinServer(
            self.directory, (host, port), plan.replicas, self.group.offer, self._description()
        )
        newcomers = Newcomers(elastic, plan.replicas, self._take, requests, on_event)
        members = ElasticMembers(elastic.min, ports, newcomers, lambda lost: None, folders=None)
        cleanup.callback(members.close)
        return members

    def _description(self) -> dict[str, Any]:
        """Description of the run for a process that joins; read by `joining_rank`."""
        job, group, plan = self.job, self.group, self.job.plan
        backend = backend_label(plan.backend, plan.requested_collective)
        return {
            "backend": backend,
            "replicas": plan.replicas,
            "plan": plan.to_dict(),
            "configuration": configuration(job.spec, group.resolved_spec.plugins, plan.backend),
            "layout": asdict(group.layout),
            "addresses": group.addresses,
            "work": describe(job.work) if is_importable(job.work) else None,
            "may_stop": job.may_stop,
            "checkpoint_inode": checkpoint_inode(job.spec),
        }

    def _take(self, rank: int, request: RemoteJoinRequest) -> RemoteProcess:
        """A process that is to join the run."""
        channel = request.take_channel()
        self.channels[rank] = channel
        info = ProcessInfo(rank, request.host, replicas=(0,))
        process = RemoteProcess(channel, info, request.address, self.directory, self.exchange)
        self.others.append(process)
        return process


@contextlib.contextmanager
def _broadcasting_failure(
    rendezvous: RendezvousHost, supervisor: Supervisor, worker: WorkerThread
) -> Iterator[None]:
    """Context in which any error is sent to the other ranks, and ends this rank's worker thread."""
    try:
        yield
    except BaseException as error:
        cause = None if isinstance(error, Exception) else supervisor.cause_of_end()
        rendezvous.broadcast_failure(cause or error)
        worker.end(END_SECONDS)
        exit_after_failure(worker)
        if cause is not None:
            raise cause from error
        raise


def _supervise(supervisor: Supervisor) -> None:
    """Returns once all ranks are done; raises the failure of a rank."""
    failure = supervisor.run()
    if failure is not None:
        raise failure
    supervisor.drain()


@contextlib.contextmanager
def heartbeats(
    reporter: LocalReporter, channels: Mapping[int, Channel], seconds: float
) -> Iterator[None]:
    """Context in which a thread sends the status of this process to the others, every `seconds`."""

    def beat() -> None:
        step, _, call = reporter.status
        for channel in [*channels.values()]:  # processes may join meanwhile
            channel.send_if_idle({"do": "beat", "step": step, "call": call})

    with repeated(beat, seconds, "isotrain-beat"):
        yield
