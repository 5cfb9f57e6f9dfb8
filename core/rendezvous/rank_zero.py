"""Rank 0's part in a joined run: it watches all, keeps the run's files, and tells the others how it ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import OnEvent
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.process import runs_the_loop
from isotrain.core.launching.supervision.checkpoint_on_signal import checkpoint_on_signals
from isotrain.core.launching.supervision.supervisor import Supervisor
from isotrain.core.rendezvous.crash_output import faulthandler_enabled
from isotrain.core.rendezvous.heartbeat import HeartbeatInterval, sigterm_as_exception
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.remote_process import LocalProcess, RemoteProcess
from isotrain.core.rendezvous.rendezvous import RendezvousHost
from isotrain.core.rendezvous.worker_group import WorkerGroup
from isotrain.core.rendezvous.worker_thread import END_SECONDS, WorkerThread
from isotrain.core.system.process import environ_set, exit_after_failure
from isotrain.core.system.standard_streams import enlarge_pipe
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.codec import encode_value

_STDOUT = 1
"""Whatever has been put in the place of `sys.stdout`."""


class RankZeroLauncher:
    """What rank 0 has in the place of a launcher: all processes are there already."""

    def __init__(self, party: WorkerGroup) -> None:
        self._party = party

    def launch(
        self, job: Job, directory: Path, *, on_event: OnEvent, first_port: int | None = None
    ) -> list[Any]:
        """Does this process's part of a job, and watches the others.

        Args:
            job: The same as theirs.
            directory: Where the run keeps its files.
            on_event: Called with every event.
            first_port: Of no use here: the ports were chosen when the processes met.

        Returns:
            What the job's function returned, by rank, of the processes with a session.

        Raises:
            RunFailedError: A process died, raised, or fell silent.
        """
        meeting = self._party.rendezvous
        assert isinstance(meeting, RendezvousHost)
        agreed = self._party.exchange_plan(job.plan, directory, job.resume)
        meeting.close_server()
        job = replace(job, key=meeting.key.derive("parameter-server run"))
        line, channels = LocalReporter(0), meeting.channels
        own = LocalProcess(line, agreed.context.local_peer, directory)
        others = [
            RemoteProcess(channels[peer.rank], peer, directory) for peer in agreed.context.peers[1:]
        ]
        returned: list[Any] = []
        work = WorkerThread(job, self._party.cast, agreed.context, line, returned.append)

        def let_begin() -> None:
            work.begin()
            for channel in channels.values():
                channel.send({"do": "begin"})

        with _taking_part(job, line, list(channels.values())):
            supervisor = Supervisor(
                [own, *others], job.plan.timeouts, on_event, let_begin, job.ignored_log_lines
            )
            work.start()
            with _failing_together(meeting, supervisor, work):
                _watch(supervisor)
                work.join()
                found = (each.returned for each in others if runs_the_loop(each.peer.role))
                values = [*returned, *found]
                plain, arrays = encode_value(values)
                for channel in channels.values():
                    channel.send({"do": "leave", "returned": plain}, arrays)
            meeting.close()
        return values


@contextlib.contextmanager
def _taking_part(job: Job, line: LocalReporter, channels: Sequence[Channel]) -> Iterator[None]:
    """What holds in this process while it works and watches."""
    with contextlib.ExitStack() as stack:
        stack.callback(line.close)
        enlarge_pipe(_STDOUT)  # whose reader, the engine, may be held by a terminal
        stack.enter_context(faulthandler_enabled())
        stack.enter_context(sigterm_as_exception())
        if job.spec.checkpoint is not None:
            stack.enter_context(checkpoint_on_signals([line]))
        stack.enter_context(environ_set(job.plan.environment_variables))
        pace = HeartbeatInterval.of(len(job.plan.processes), job.plan.timeouts["silence"])
        stack.enter_context(heartbeats(line, channels, pace.max_seconds))
        yield


@contextlib.contextmanager
def _failing_together(
    meeting: RendezvousHost, supervisor: Supervisor, work: WorkerThread
) -> Iterator[None]:
    """Tells the others what its body raises, and ends this process's own work then."""
    try:
        yield
    except BaseException as error:
        cause = None if isinstance(error, Exception) else supervisor.cause_of_end()
        meeting.broadcast_failure(cause or error)
        work.end(END_SECONDS)
        exit_after_failure(work)
        if cause is not None:
            raise cause from error
        raise


def _watch(supervisor: Supervisor) -> None:
    """Returns once all are done; raises what one failed by."""
    failure = supervisor.run()
    if failure is not None:
        raise failure
    supervisor.drain()


@contextlib.contextmanager
def heartbeats(line: LocalReporter, channels: Sequence[Channel], seconds: float) -> Iterator[None]:
    """Within it, the others hear all the time that this process lives, and where it is.

    Args:
        line: Of this process.
        channels: To the others.
        seconds: Between two messages.
    """
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(seconds):
            step, _, call = line.status
            for channel in channels:
                channel.send({"do": "beat", "step": step, "call": call})

    thread = threading.Thread(target=beat, name="isotrain-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
