"""Watching the processes of a run: who is alive, who failed, and what to say about it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.processes import RankProcess

_GRACE_SECONDS = 1.5
"""How long after a first failure others may still say what happened to them."""
_POLL_SECONDS = 0.1
_LOG_LINES = 25

OnEvent = Callable[[Mapping[str, Any]], None]


@dataclass
class Watched:
    """What is known of one process.

    Attributes:
        process: The process.
        heard: When it was last heard of (monotonic seconds).
        step: The last step it reported; None before the first.
        call: What it reported to be doing.
        in_call: Seconds it had been doing that when last heard of.
        failure: The event by which it reported its failure.
        started: Whether it was ever heard of.
        finished: Whether it reported the end of its work.
    """

    process: RankProcess
    heard: float
    step: int | None = None
    call: str = "start"
    in_call: float = 0.0
    failure: Mapping[str, Any] | None = None
    started: bool = False
    finished: bool = False
    unread: bytes = field(default=b"", repr=False)

    @property
    def rank(self) -> int:
        return self.process.context.rank

    @property
    def died_silently(self) -> bool:
        """Whether it ended without saying that it finished or failed."""
        return self.process.exit_code is not None and not self.finished and self.failure is None

    def note(self, event: Mapping[str, Any]) -> None:
        """Takes over what an event tells."""
        self.heard = time.monotonic()
        self.started = True
        self.step = event["step"]
        self.call = event["call"]
        self.in_call = event.get("in_call", 0.0)
        if event["event"] == "failed":
            self.failure = event
        if event["event"] == "finished":
            self.finished = True


class Supervisor:
    """Reads the events of all processes until all have finished or one has failed."""

    def __init__(
        self, processes: Sequence[RankProcess], timeouts: Mapping[str, float], on_event: OnEvent
    ) -> None:
        """Watches started processes.

        Args:
            processes: One per rank.
            timeouts: Seconds: `silence`, `start`, `progress`.
            on_event: Called with every event but heartbeats, and with rank 0's output as
                `{"event": "output", "text": ...}`.
        """
        now = time.monotonic()
        self._watched = [Watched(process, now) for process in processes]
        self._timeouts = timeouts
        self._on_event = on_event
        self._selector = selectors.DefaultSelector()
        for watched in self._watched:
            os.set_blocking(watched.process.events, False)
            self._selector.register(watched.process.events, selectors.EVENT_READ, watched)
        self._output = self._watched[0].process.output
        if self._output is not None:
            os.set_blocking(self._output.fileno(), False)
            self._selector.register(self._output, selectors.EVENT_READ, None)

    def run(self) -> str | None:
        """Watches to the end.

        Returns:
            None when all finished; otherwise what happened, in words. The processes still run then.
        """
        while True:
            self._read(_POLL_SECONDS)
            if all(watched.finished for watched in self._watched):
                self._read(0)
                return None
            if any(self._has_failed(watched) for watched in self._watched):
                return self._explain()

    def _read(self, patience: float) -> None:
        for key, _ in self._selector.select(patience):
            if key.data is None:
                self._relay_output()
            else:
                self._read_events(key.data)

    def _read_events(self, watched: Watched) -> None:
        chunk = _available(watched.process.events)
        if chunk is None:
            self._forget(watched.process.events)
            return
        *lines, watched.unread = (watched.unread + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            watched.note(event)
            if event["event"] != "heartbeat":
                self._on_event(event)

    def _forget(self, source: Any) -> None:
        """Reads no more from a pipe whose other end is closed."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _relay_output(self) -> None:
        assert self._output is not None
        chunk = _available(self._output.fileno())
        if chunk is None:
            self._forget(self._output)
            return
        with self._watched[0].process.log.open("ab") as log:
            log.write(chunk)
        self._on_event({"event": "output", "text": chunk.decode(errors="replace")})

    def _has_failed(self, watched: Watched) -> bool:
        if watched.died_silently:
            self._read_events(watched)  # its last words may still be in the pipe
        return (
            watched.failure is not None
            or watched.died_silently
            or self._is_silent(watched)
            or self._is_stuck(watched)
        )

    def _is_silent(self, watched: Watched) -> bool:
        if watched.finished:
            return False
        limit = self._timeouts["silence"]
        return time.monotonic() - watched.heard > limit

    def _is_stuck(self, watched: Watched) -> bool:
        """Whether it has been in one call for too long; starting has a limit of its own."""
        if watched.finished or watched.call == "between calls":
            return False
        limit = self._timeouts["start" if watched.call in _STARTING else "progress"]
        return watched.in_call > limit

    def _explain(self) -> str:
        self._gather()
        culprit = min(self._watched, key=self._suspicion)
        for watched in self._watched:
            if watched is not culprit or watched.failure is None:
                watched.process.ask_for_stacks()
        self._read(0.3)
        return describe_failure(culprit, self._watched, self._verdict(culprit))

    def _gather(self) -> None:
        """Lets the other processes report what the failure did to them."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            self._read(_POLL_SECONDS)
            if all(w.failure or w.finished or w.process.exit_code is not None for w in self._watched):
                return

    def _suspicion(self, watched: Watched) -> tuple[int, float]:
        """Orders processes by how likely they are the cause, and not a consequence."""
        if watched.died_silently:
            return 0, watched.heard
        if watched.process.is_stopped or self._is_silent(watched):
            return 1, watched.heard
        if watched.failure is not None:
            return 2, watched.failure["time"]
        if self._is_stuck(watched):
            return 3, -watched.in_call
        return 4, 0.0

    def _verdict(self, watched: Watched) -> str:
        code = watched.process.exit_code
        if watched.died_silently and code is not None:
            if code < 0:
                return f"was ended by {signal.Signals(-code).name}"
            return f"ended with exit code {code} before its work was done"
        if watched.process.is_stopped:
            silent = time.monotonic() - watched.heard
            return f"is suspended (SIGSTOP) and was last heard of {silent:.1f} s ago"
        if watched.failure is None and self._is_silent(watched):
            if not watched.started:
                return f"did not start within {self._timeouts['silence']:g} s"
            return f"fell silent: nothing heard of it for {self._timeouts['silence']:g} s"
        if watched.failure is not None:
            return f"raised {watched.failure['error']}"
        return f"made no progress for {watched.in_call:.0f} s"


_STARTING = ("start", "read job", "load data", "build model")


def describe_failure(culprit: Watched, everyone: Sequence[Watched], verdict: str) -> str:
    """Says which rank failed, at which step, in which call, and where the others were."""
    where = "before its first step" if culprit.step is None else f"at step {culprit.step}"
    lines = [
        f"rank {culprit.rank} of {len(everyone)} {verdict} {where}, in call {culprit.call!r}.",
        _evidence(culprit),
    ]
    for watched in everyone:
        if watched is not culprit:
            lines.append(f"rank {watched.rank}: {_whereabouts(watched)}")
    lines.append(f"logs: {culprit.process.log.parent}/rank-*.log")
    return "\n".join(line for line in lines if line)


def _evidence(culprit: Watched) -> str:
    if culprit.failure is not None:
        return str(culprit.failure["traceback"]).rstrip()
    text = culprit.process.log.read_text(encoding="utf-8", errors="replace")
    tail = text.splitlines()[-_LOG_LINES:]
    return "\n".join(["the end of its log:", *tail]) if tail else ""


def _whereabouts(watched: Watched) -> str:
    step = "before its first step" if watched.step is None else f"last step {watched.step}"
    if watched.failure is not None:
        message = str(watched.failure["message"]).strip().splitlines()
        return f"{step}, then {watched.failure['error']}: {message[0] if message else ''}"
    if watched.finished:
        return f"{step}, finished"
    if watched.died_silently:
        return f"{step}, then ended with exit code {watched.process.exit_code}"
    return f"{step}, in call {watched.call!r}"


def _available(descriptor: int) -> bytes | None:
    """All that can be read without waiting; None at the end."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 1 << 16):
            found += chunk
        return found or None
    return found
