"""Ranks that were started from outside, as rank 0's supervisor monitors them: itself, and the other ranks."""

from __future__ import annotations

import faulthandler
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import Failed, Heartbeat, read_event
from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.process import Address, ProcessContext, ProcessInfo
from isotrain.core.contracts.reporter import Status
from isotrain.core.launching.run_directory.run_directory import rank_log
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.state_exchange import StateExchange
from isotrain.core.system.process_activity import activity, activity_of_bytes, waits
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.codec import decode_value

_SIGN_OF_LIFE = Heartbeat().to_line()
_FAILED = f'"{Failed.kind}"'.encode()


class LocalProcess:
    """Rank 0 itself, as a monitored process.

    Attributes:
        info: Rank, host and role of this process.
        log: Log file with its output.
        address: Address of this host, and the port that is reserved for it.
    """

    output: int | None = None
    is_gone = False
    exit_code: int | None = None
    is_stopped = False

    def __init__(self, reporter: LocalReporter, context: ProcessContext, directory: Path) -> None:
        self.info = context.local_process
        self.log = rank_log(directory, context.rank)
        self.events = reporter.events
        self.address = context.address
        self.acknowledge = reporter.acknowledge
        self.request_regroup = reporter.request_regroup
        self.void_group = reporter.void_group
        self.publish_membership = reporter.publish_membership
        self._reporter = reporter

    def read_lines(self) -> list[bytes] | None:
        """The new events, one line each, without waiting."""
        return self._reporter.read_lines()

    @property
    def status(self) -> Status:
        """Step and current call."""
        return self._reporter.status

    @property
    def activity(self) -> float:
        """Measure of its work (CPU time, I/O), which only grows."""
        return activity(os.getpid())

    @property
    def waits(self) -> dict[int, float]:
        """Seconds that each of its threads was ready without a CPU."""
        return waits(os.getpid())

    def request_stacks(self) -> None:
        """Writes the stacks of all threads to the log."""
        with self.log.open("a", encoding="utf-8") as log:
            faulthandler.dump_traceback(log, all_threads=True)

    def end(self) -> None:
        """Does nothing: rank 0 ends by itself, after the other ranks."""


class RemoteProcess:
    """Another rank of the run, as a monitored process, over its channel.

    Attributes:
        info: Rank, host and role of the process.
        log: Log file on this host with the output that it has sent.
        address: Address of its host, and the port there that is reserved for it.
        returned: Return value of its job function.
    """

    output: int | None = None
    exit_code: int | None = None
    is_stopped = False

    def __init__(
        self,
        channel: Channel,
        info: ProcessInfo,
        address: Address,
        directory: Path,
        exchange: StateExchange,
    ) -> None:
        self.info = info
        self.log = rank_log(directory, info.rank)
        self.address = address
        self.events = channel.fileno()
        self.returned: Any = None
        self.is_gone = False
        self.status = Status(None, time.monotonic(), "start")
        self._channel = channel
        self._exchange = exchange
        self._clock_offset = math.inf
        """Seconds by which its clock is behind this one, plus the shortest latency of a message."""
        self.log.touch()

    def read_lines(self) -> list[bytes] | None:
        """The new events, one line each, without waiting; None at the end of the stream."""
        messages = self._channel.read()
        if messages is None:
            self.is_gone = True
            return None
        lines = []
        for message, arrays in messages:
            if "status" in message:
                self._update_status(message)
            if "event" in message:
                lines.append(self._in_local_time(str(message["event"]).encode()))
            elif "output" in message:
                self._append_to_log(message["output"])
            elif "returned" in message:
                self.returned = decode_value(message["returned"], arrays)
            else:
                lines.append(_SIGN_OF_LIFE)
                if "part" in message:
                    self._exchange.receive(message, arrays)
        return lines

    @property
    def activity(self) -> float:
        """Measure of the bytes received from it, incomplete messages included; it only grows."""
        return activity_of_bytes(self._channel.received)

    @property
    def waits(self) -> dict[int, float]:
        """Empty: not known on this host."""
        return {}

    def _update_status(self, message: Mapping[str, Any]) -> None:
        step, age, call = message["status"]
        self.status = Status(step, time.monotonic() - age, call)
        self._clock_offset = min(self._clock_offset, time.time() - message["clock"])

    def _in_local_time(self, line: bytes) -> bytes:
        """An event; a failure gets the time of the clock here: the first failure is most likely the cause."""
        event = read_event(line) if _FAILED in line else None
        if not isinstance(event, Failed):
            return line
        return replace(event, time=event.time + self._clock_offset).to_line()

    def _append_to_log(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text)

    def request_stacks(self) -> None:
        """Makes the rank write the stacks of its threads to its log."""
        self._channel.send({"do": "stacks"})

    def end(self) -> None:
        """Makes the rank end at once; nothing is sent to it any more."""
        self._channel.send({"do": "end"})
        self._channel.shutdown_write()

    def acknowledge(self, first: int) -> None:
        """Tells it the first step in the newest `Steps` that rank 0 has reported."""
        self._channel.send({"do": "acknowledge", "first": first})

    def request_regroup(self) -> None:
        """Requests that it leaves its process group before its next step."""
        self._channel.send({"do": "regroup"})

    def void_group(self, generation: int) -> None:
        """Tells it that its process group of a generation has lost a member."""
        self._channel.send({"do": "void", "generation": generation})

    def publish_membership(self, membership: Membership) -> None:
        """Tells it which process group it is to join."""
        self._channel.send({"do": "form", "membership": membership.to_bytes().decode()})
