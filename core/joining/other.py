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
from isotrain.core.joining.channel import Channel
from isotrain.core.joining.meeting import Member, error_of
from isotrain.core.joining.output import Tail, sent_to_file
from isotrain.core.joining.own_line import OwnLine
from isotrain.core.joining.pace import Pace
from isotrain.core.joining.party import Party
from isotrain.core.joining.sigterm import unwinding_on_sigterm
from isotrain.core.joining.work import END_SECONDS, Working
from isotrain.core.launching.diagnosis import whereabouts
from isotrain.core.launching.returned import packed_value, unpacked_value
from isotrain.core.launching.saving_on_signals import saving_on_signals
from isotrain.core.system.leaving import leave_after_failure
from isotrain.core.system.variables import variables_set

_LOOK_SECONDS = 0.1
_HEARTBEAT = f'{{"event": "{Heartbeat.kind}"'.encode()
_PAUSE_SECONDS = 1.0
_STDERR = 2
"""Whatever has been put in the place of `sys.stderr`."""


class Relay:
    """Tells rank 0 what this process reports, and does what rank 0 says."""

    def __init__(
        self, channel: Channel, line: OwnLine, work: Working, silence: float, processes: int
    ) -> None:
        """Prepares.

        Args:
            channel: To rank 0.
            line: Of this process.
            work: That it does.
            silence: Seconds without a word from rank 0 after which that is taken for lost.
            processes: In the run.
        """
        self._pace = Pace.of(processes, silence)
        self._told: Status | None = None
        self._told_at = 0.0
        self._channel = channel
        self._line = line
        self._work = work
        self._silence = silence
        self._first = Status(None, 0.0, "start")
        self._heard = time.monotonic()
        self._received = 0

    def run(self, tail: Tail) -> list[Any]:
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

    def _pass_on(self, tail: Tail) -> None:
        lines = (
            self._line.read_lines() or ()
        )  # first: what was printed before an event goes before it
        while text := tail.read():
            self._channel.send({"output": text})
        for line in lines:
            if not line.startswith(_HEARTBEAT):  # whatever is sent is one
                self._channel.send({"event": line.decode(), **self._status()})
        pace = self._pace.news if self._told != self._line.status else self._pace.beat
        if time.monotonic() - self._told_at > pace:
            self._channel.send(self._status())

    def _status(self) -> dict[str, Any]:
        self._told, self._told_at = self._line.status, time.monotonic()
        return told_status(self._line)

    def _obey(self, tail: Tail) -> tuple[bool, list[Any]]:
        """Does what rank 0 has said; whether the run is over, and what was returned then."""
        messages = self._channel.read()
        if messages is None:
            raise self._lost("is gone: its connection was closed")
        if self._channel.received != self._received:
            self._received, self._heard = self._channel.received, time.monotonic()
        for message, arrays in messages:
            if "error" in message:  # of the run, or of rank 0 before or after it
                raise error_of(message)
            what = message["do"]
            if what == "leave":
                values: list[Any] = unpacked_value(message["returned"], arrays)
                return True, values
            self._do(what, message, tail)
        silent = time.monotonic() - self._heard
        if silent > self._silence:
            raise self._lost(f"fell silent: nothing was heard of it for {silent:.0f} s")
        return False, []

    def _do(self, what: str, message: Any, tail: Tail) -> None:
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
        self._channel.shut()  # nobody waits for its word any more
        own = whereabouts(self._line.status)
        return PeerLostError(
            f"rank 0 {how}. It was {whereabouts(self._first)}, and this process {own}."
        )


def attend(party: Party, job: Job) -> tuple[list[Any], str]:
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


def _attend(party: Party, job: Job, spare: Path) -> tuple[list[Any], str]:
    """As `attend`, with a folder for where rank 0's cannot be seen."""
    meeting = party.meeting
    assert isinstance(meeting, Member)
    channel = meeting.channel
    with meeting.telling():
        agreed = party.agree(job.plan, spare, None)
    own = replace(job, key=meeting.key.derived("served run"), resume=agreed.resume)
    line = OwnLine(party.rank)

    def hand_over(value: Any) -> None:
        plain, arrays = packed_value(value)
        channel.send({"returned": plain}, arrays)

    work = Working(own, party.cast, agreed.context, line, hand_over)
    relay = Relay(channel, line, work, job.plan.timeouts["silence"], len(job.plan.processes))
    with contextlib.ExitStack() as stack:
        stack.callback(line.close)
        stack.enter_context(unwinding_on_sigterm())
        if job.spec.checkpoint is not None:
            stack.enter_context(saving_on_signals([line]))
        stack.enter_context(variables_set(job.plan.variables))
        tail = stack.enter_context(sent_to_file())
        work.start()
        try:
            values = relay.run(tail)
        except BaseException as error:
            if not isinstance(error, IsotrainError):
                _tell(error, channel, line)
            work.end(END_SECONDS)
            leave_after_failure(work)
            meeting.close()
            raise
        meeting.close()
    return values, str(agreed.directory)


def told_status(line: OwnLine) -> dict[str, Any]:
    """Where this process is, and what its clock shows, as it tells rank 0, whose clock is another one."""
    step, since, call = line.status
    return {"status": [step, time.monotonic() - since, call], "clock": time.time()}


def _tell(error: BaseException, channel: Channel, line: OwnLine) -> None:
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
        blames_peer=False,
    )
    channel.send({"event": failed.to_line().decode().strip(), **told_status(line)})
    sys.stderr.flush()
