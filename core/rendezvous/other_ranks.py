"""The part of any other process in a joined run: it does its work, and tells rank 0 how it goes."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import Failed, Heartbeat
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.reporter import Status
from isotrain.core.errors import IsotrainError, PeerLostError
from isotrain.core.launching.supervision.checkpoint_on_signal import checkpoint_on_signals
from isotrain.core.launching.supervision.failure_diagnosis import whereabouts
from isotrain.core.rendezvous.heartbeat import HeartbeatInterval, sigterm_as_exception
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.output_redirect import OutputTail, output_to_file
from isotrain.core.rendezvous.rendezvous import RendezvousClient, remote_error
from isotrain.core.rendezvous.worker_group import WorkerGroup
from isotrain.core.rendezvous.worker_thread import END_SECONDS, WorkerThread
from isotrain.core.system.process import environ_set, exit_after_failure
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.codec import decode_value, encode_value

_LOOK_SECONDS = 0.1
_HEARTBEAT = f'{{"event": "{Heartbeat.kind}"'.encode()
_PAUSE_SECONDS = 1.0
_STDERR = 2
"""Whatever has been put in the place of `sys.stderr`."""


class RankRelay:
    """Tells rank 0 what this process reports, and does what rank 0 says."""

    def __init__(
        self,
        channel: Channel,
        line: LocalReporter,
        work: WorkerThread,
        silence: float,
        processes: int,
    ) -> None:
        """Prepares.

        Args:
            channel: To rank 0.
            line: Of this process.
            work: That it does.
            silence: Seconds without a word from rank 0 after which that is taken for lost.
            processes: In the run.
        """
        self._pace = HeartbeatInterval.of(processes, silence)
        self._told: Status | None = None
        self._told_at = 0.0
        self._channel = channel
        self._line = line
        self._work = work
        self._silence = silence
        self._first = Status(None, 0.0, "start")
        self._heard = time.monotonic()
        self._received = 0

    def run(self, tail: OutputTail) -> list[Any]:
        """Goes on until rank 0 says that the run has ended.

        Args:
            tail: Of this process's output.

        Returns:
            What every process returned, by rank.

        Raises:
            IsotrainError: The run has failed, in rank 0's words; or rank 0 is lost.
        """
        with selectors.DefaultSelector() as selector:
            for source in (self._line.events, self._channel):
                selector.register(source, selectors.EVENT_READ)
            while True:
                began = time.monotonic()
                selector.select(_LOOK_SECONDS)
                self._forgive(time.monotonic() - began - _LOOK_SECONDS)
                self._pass_on(tail)
                ended, values = self._obey(tail)
                if ended:
                    return values

    def _forgive(self, pause: float) -> None:
        """Counts no time in which this process was suspended."""
        if pause > _PAUSE_SECONDS:
            self._heard += pause

    def _pass_on(self, tail: OutputTail) -> None:
        lines = (
            self._line.read_lines() or ()
        )  # first: what was printed before an event goes before it
        while text := tail.read():
            self._channel.send({"output": text})
        for line in lines:
            if not line.startswith(_HEARTBEAT):  # whatever is sent is one
                self._channel.send({"event": line.decode(), **self._status()})
        pace = self._pace.min_seconds if self._told != self._line.status else self._pace.max_seconds
        if time.monotonic() - self._told_at > pace:
            self._channel.send(self._status())

    def _status(self) -> dict[str, Any]:
        self._told, self._told_at = self._line.status, time.monotonic()
        return status_message(self._line)

    def _obey(self, tail: OutputTail) -> tuple[bool, list[Any]]:
        """Does what rank 0 has said; whether the run is over, and what was returned then."""
        messages = self._channel.read()
        if messages is None:
            raise self._lost("is gone: its connection was closed")
        if self._channel.received != self._received:
            self._received, self._heard = self._channel.received, time.monotonic()
        for message, arrays in messages:
            if "error" in message:  # of the run, or of rank 0 before or after it
                raise remote_error(message)
            what = message["do"]
            if what == "leave":
                values: list[Any] = decode_value(message["returned"], arrays)
                return True, values
            self._do(what, message, tail)
        silent = time.monotonic() - self._heard
        if silent > self._silence:
            raise self._lost(f"fell silent: nothing was heard of it for {silent:.0f} s")
        return False, []

    def _do(self, what: str, message: Any, tail: OutputTail) -> None:
        if what == "beat":
            self._first = Status(message["step"], 0.0, message["call"])
        elif what == "begin":
            self._work.begin()
        elif what == "stacks":
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        elif what == "end":  # the run goes on, and an engine would end it for a process that fails
            tail.dismiss()
            os._exit(0)

    def _lost(self, how: str) -> PeerLostError:
        self._channel.shutdown()  # nobody waits for its word any more
        own = whereabouts(self._line.status)
        return PeerLostError(
            f"rank 0 {how}. It was {whereabouts(self._first)}, and this process {own}."
        )


def run_rank(party: WorkerGroup, job: Job) -> tuple[list[Any], str]:
    """Does this process's part of a job.

    Args:
        party: That this process belongs to.
        job: Made as rank 0 makes it.

    Returns:
        What every process returned, by rank; and the run's directory on rank 0's host.

    Raises:
        IsotrainError: The run has failed; says how.
    """
    with tempfile.TemporaryDirectory(prefix="isotrain-joined-") as spare:
        return _attend(party, job, Path(spare))


def _attend(party: WorkerGroup, job: Job, spare: Path) -> tuple[list[Any], str]:
    """As `run_rank`, with a folder for where rank 0's cannot be seen."""
    meeting = party.rendezvous
    assert isinstance(meeting, RendezvousClient)
    channel = meeting.channel
    with meeting.broadcasting_errors():
        agreed = party.exchange_plan(job.plan, spare, None)
    own = replace(job, key=meeting.key.derive("parameter-server run"), resume=agreed.resume)
    line = LocalReporter(party.rank)

    def hand_over(value: Any) -> None:
        plain, arrays = encode_value(value)
        channel.send({"returned": plain}, arrays)

    work = WorkerThread(own, party.cast, agreed.context, line, hand_over)
    relay = RankRelay(channel, line, work, job.plan.timeouts["silence"], len(job.plan.processes))
    with contextlib.ExitStack() as stack:
        stack.callback(line.close)
        stack.enter_context(sigterm_as_exception())
        if job.spec.checkpoint is not None:
            stack.enter_context(checkpoint_on_signals([line]))
        stack.enter_context(environ_set(job.plan.environment_variables))
        tail = stack.enter_context(output_to_file())
        work.start()
        try:
            values = relay.run(tail)
        except BaseException as error:
            if not isinstance(error, IsotrainError):
                _tell(error, channel, line)
            work.end(END_SECONDS)
            exit_after_failure(work)
            meeting.close()
            raise
        meeting.close()
    return values, str(agreed.directory)


def status_message(line: LocalReporter) -> dict[str, Any]:
    """Where this process is, and what its clock shows, as it tells rank 0, whose clock is another one."""
    step, since, call = line.status
    return {"status": [step, time.monotonic() - since, call], "clock": time.time()}


def _tell(error: BaseException, channel: Channel, line: LocalReporter) -> None:
    """Tells rank 0 what has ended this process from outside of its work."""
    kind = type(error).__name__
    shown = "".join(traceback.format_exception(error))
    step, _, call = line.status
    failed = Failed(
        rank=line.reporter.rank,
        time=time.time(),
        step=step,
        call=call,
        error=kind,
        message=f"{kind}: {error}".strip(": "),
        traceback=shown,
        is_peer_error=False,
    )
    channel.send({"event": failed.to_line().decode().strip(), **status_message(line)})
    sys.stderr.flush()
