"""The processes of a joined run, as rank 0 watches them: itself, and those at the other end of a channel."""

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
from isotrain.core.contracts.process import Peer
from isotrain.core.contracts.reporter import Status
from isotrain.core.launching.run_directory.run_directory import rank_log
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.system.process_activity import activity, activity_of_bytes, waits
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.codec import decode_value

_SIGN_OF_LIFE = Heartbeat().to_line()
_FAILED = f'"{Failed.kind}"'.encode()


class LocalProcess:
    """Rank 0 itself.

    Attributes:
        peer: Who it is.
        log: The file with its output.
    """

    output: int | None = None
    is_gone = False
    exit_code: int | None = None
    is_stopped = False

    def __init__(self, line: LocalReporter, peer: Peer, directory: Path) -> None:
        self.peer = peer
        self.log = rank_log(directory, peer.rank)
        self.events = line.events
        self._line = line

    def read_lines(self) -> list[bytes] | None:
        """The events that it has told, a line each, without waiting."""
        return self._line.read_lines()

    @property
    def status(self) -> Status:
        """Where it is."""
        return self._line.status

    @property
    def activity(self) -> float:
        """Grows with what it does."""
        return activity(os.getpid())

    @property
    def waits(self) -> dict[int, float]:
        """How long each of its threads was ready, and had no processor."""
        return waits(os.getpid())

    def request_stacks(self) -> None:
        """Writes where each thread is to the log."""
        with self.log.open("a", encoding="utf-8") as log:
            faulthandler.dump_traceback(log, all_threads=True)

    def end(self) -> None:
        """It ends by itself, when it has told the others."""


class RemoteProcess:
    """Another process of the run.

    Attributes:
        peer: Who it is.
        log: The file here with what it has sent of its output.
        returned: What its work has returned.
    """

    output: int | None = None
    exit_code: int | None = None
    is_stopped = False

    def __init__(self, channel: Channel, peer: Peer, directory: Path) -> None:
        self.peer = peer
        self.log = rank_log(directory, peer.rank)
        self.events = channel.fileno()
        self.returned: Any = None
        self.is_gone = False
        self.status = Status(None, time.monotonic(), "start")
        self._channel = channel
        self._behind = math.inf
        """Seconds by which its clock is behind this one, and the quickest message was under way."""
        self.log.touch()

    def read_lines(self) -> list[bytes] | None:
        """The events that it has told, a line each, without waiting; None when no more will come."""
        messages = self._channel.read()
        if messages is None:
            self.is_gone = True
            return None
        lines = []
        for message, arrays in messages:
            if "status" in message:
                self._note(message)
            if "event" in message:
                lines.append(self._timed_here(str(message["event"]).encode()))
            elif "output" in message:
                self._keep(message["output"])
            elif "returned" in message:
                self.returned = decode_value(message["returned"], arrays)
            else:
                lines.append(_SIGN_OF_LIFE)
        return lines

    @property
    def activity(self) -> float:
        """Grows with what comes of it, of messages that are not whole yet too."""
        return activity_of_bytes(self._channel.received)

    @property
    def waits(self) -> dict[int, float]:
        """Nobody here knows."""
        return {}

    def _note(self, message: Mapping[str, Any]) -> None:
        step, age, call = message["status"]
        self.status = Status(step, time.monotonic() - age, call)
        self._behind = min(self._behind, time.time() - message["clock"])

    def _timed_here(self, line: bytes) -> bytes:
        """An event; of a failure by the clock here: what came first is most likely the cause."""
        event = read_event(line) if _FAILED in line else None
        if not isinstance(event, Failed):
            return line
        return replace(event, time=event.time + self._behind).to_line()

    def _keep(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text)

    def request_stacks(self) -> None:
        """Makes it write where each of its threads is to its log."""
        self._channel.send({"do": "stacks"})

    def end(self) -> None:
        """Makes it end at once."""
        self._channel.send({"do": "end"})
