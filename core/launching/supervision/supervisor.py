"""Watching the processes of a run: reads what they report, and notices when one is lost."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import (
    Failed,
    Finished,
    Heartbeat,
    OnEvent,
    Output,
    ProcessEvent,
    Ready,
    WorkerLost,
    read_event,
)
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.run_directory.pipes import read_available
from isotrain.core.launching.supervision.failure_diagnosis import (
    PEERS_FAILED,
    RankStatus,
    run_failure,
    suspicion,
    verdict,
)
from isotrain.core.launching.supervision.hang_detection import HangDetector
from isotrain.core.launching.supervision.monitored_process import MonitoredProcess
from isotrain.core.system.deadline import Deadline

_GRACE_SECONDS = 1.5
"""How long after a first failure others may still say what happened to them."""
_STACKS_SECONDS = 0.3
_MOST_STACKS_SECONDS = 3.0
"""For a process that says that it lives to begin to write where it is, on a busy machine."""
_RECENT_SECONDS = 2.0
_LAST_WORDS_SECONDS = 0.3
_COORDINATOR_PATIENCE = 1.5
"""Times the limit of silence: native code of it may wait for a silent worker, which is to be ended first."""
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
_STARTING = ("start", "read job")
"""Calls in which a process waits for no other: one that does nothing in them is lost."""


def _nothing() -> None:
    """For whom nobody waits."""


class Supervisor:
    """Reads the events of all processes until all have finished or one has failed."""

    def __init__(
        self,
        processes: Sequence[MonitoredProcess],
        timeouts: Mapping[str, float],
        on_event: OnEvent,
        on_ready: Callable[[], None] = _nothing,
        ignored_log_lines: Sequence[str] = (),
        poll_seconds: float = 0.1,
    ) -> None:
        """Watches started processes.

        Args:
            processes: One per rank.
            timeouts: Seconds: `silence`, `start`, `progress`.
            on_event: Called with every event but heartbeats, and with rank 0's output.
            on_ready: Called when all that have a session are ready.
            ignored_log_lines: Of the backend's logs; see `Adapter`.
            poll_seconds: After which all processes are looked at though none says that it has ended.
        """
        now = time.monotonic()
        self._watched = [
            RankStatus(
                process, last_heard=now, last_active=now, ignored_log_lines=ignored_log_lines
            )
            for process in processes
        ]
        self._stagnation = HangDetector(self._watched, timeouts)
        self._timeouts = timeouts
        self._on_event = on_event
        self._on_ready = on_ready
        self._poll_seconds = poll_seconds
        self._looping = [watched for watched in self._watched if watched.has_session]
        self._has_news = False
        self._last_judged = now
        self._last_poll = now
        self._last_look = now
        self._selector = selectors.DefaultSelector()
        for watched in self._watched:
            self._selector.register(watched.process.events, selectors.EVENT_READ, watched)
        self._output = self._watched[0].process.output
        if self._output is not None:
            os.set_blocking(self._output, False)
            self._selector.register(self._output, selectors.EVENT_READ, None)

    def run(self) -> RunFailedError | None:
        """Watches to the end.

        Returns:
            None when all finished; otherwise what happened. The processes still run then.
        """
        while True:
            self._poll(self._poll_seconds)
            if not self._is_to_judge():
                continue
            if self._work_is_done():
                self._end_the_suspended()
                return None
            self._look_around()
            self._stagnation.find(time.monotonic())
            if self._failed():
                if not any(watched.lost for watched in self._suspects()):
                    self._gather()
                if not self._work_is_done():  # else who serves it blames those who have left
                    return self._explain()

    def _is_to_judge(self) -> bool:
        """Whether to look at all processes: each takes a while, and of many one always tells something."""
        now = time.monotonic()
        if not self._has_news and now - self._last_judged < self._poll_seconds:
            return False
        self._has_news, self._last_judged = False, now
        return True

    def _work_is_done(self) -> bool:
        """Whether every process with a session has finished; those that serve them end by themselves."""
        return all(watched.finished for watched in self._watched if watched.has_session)

    def _end_the_suspended(self) -> None:
        """Does not wait for those that cannot end by themselves."""
        for watched in self._watched:
            if not watched.has_session and watched.process.is_stopped:
                watched.process.end()

    def cause_of_end(self) -> RunFailedError | None:
        """Who had died, if anybody, when a signal ended this process: engines then send it to all.

        Reads for a moment what the others still tell.

        Returns:
            The error that the run ends with; None where nobody has died without a word.
        """
        self._read_for(_LAST_WORDS_SECONDS)
        dead = [watched for watched in self._failed() if watched.died_silently]
        return run_failure(min(dead, key=suspicion), self._watched) if dead else None

    def drain(self) -> None:
        """Reads what is left once the processes are gone, and stops reading."""
        self._poll(0)
        self._selector.close()

    def _poll(self, patience: float) -> None:
        began = time.monotonic()
        self._forgive(began - self._last_poll)
        for key, _ in self._selector.select(patience):
            if key.data is None:
                self._relay_output()
            else:
                self._read_events(key.data)
        self._forgive(time.monotonic() - began - patience)
        self._last_poll = time.monotonic()

    def _forgive(self, pause: float) -> None:
        """Counts no time in which this process was suspended, or the whole machine was."""
        if pause > _PAUSE_SECONDS:
            for watched in self._watched:
                watched.excuse(pause)
            self._stagnation.excuse(pause)

    def _read_events(self, watched: RankStatus) -> None:
        lines = watched.process.read_lines()
        if lines is None:
            self._has_news = True
            self._forget(watched.process.events)
            return
        for line in lines:
            read = read_event(line)
            event = read if isinstance(read, ProcessEvent) else None
            watched.note(event)
            if event is not None and not isinstance(event, Heartbeat):
                watched.last_active = watched.last_heard
                self._on_event(self._completed(event))
            if isinstance(event, Ready) and all(each.ready for each in self._looping):
                self._on_ready()
            self._has_news |= isinstance(event, Finished | Failed)

    def _completed(self, event: ProcessEvent) -> ProcessEvent:
        """Adds what only the launcher can tell."""
        if isinstance(event, WorkerLost):
            return replace(event, cause=self._cause(event.lost_rank))
        return event

    def _cause(self, rank: int) -> str | None:
        """What became of a lost worker, as far as can be seen from here."""
        watched = self._watched[rank]
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while not watched.process.is_gone and time.monotonic() < deadline:
            time.sleep(0.01)  # its connection is closed before it is gone
            self._read_events(watched)
        if watched.lost is None and not watched.process.is_gone:
            return None
        return watched.lost or verdict(watched)

    def _forget(self, source: Any) -> None:
        """Reads no more from a pipe whose other end is closed."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _relay_output(self) -> None:
        assert self._output is not None
        chunk = read_available(self._output)
        if chunk is None:
            self._forget(self._output)
            return
        self._on_event(Output(text=chunk.decode(errors="replace")))

    def _look_around(self) -> None:
        now = time.monotonic()
        if now - self._last_look < _LOOK_SECONDS:
            return
        self._last_look = now
        for watched in self._watched:
            quiet = now - watched.last_heard > 2 * _LOOK_SECONDS
            if not watched.finished and (quiet or watched.process.status.call in _STARTING):
                watched.look()

    def _failed(self) -> list[RankStatus]:
        """Those that failed; every process is looked at."""
        return [watched for watched in self._watched if self._has_failed(watched)]

    def _has_failed(self, watched: RankStatus) -> bool:
        if watched.finished:
            return False
        if watched.process.is_gone:
            self._read_events(watched)  # its last words may still be in the pipe
            watched.died_at = watched.died_at or time.time()
        if watched.lost is None:
            watched.lost = self._loss(watched)
            if watched.lost is not None and not watched.is_needed:
                watched.process.end()  # the run goes on without it
        if not watched.is_needed:
            return watched.failure is not None
        return watched.failure is not None or watched.died_silently or watched.lost is not None

    def _loss(self, watched: RankStatus) -> str | None:
        """Why a living process is to be taken for lost, or None.

        `silence` seconds without a sign of life; a process that cannot report, but uses a processor
        or reads, is only slow and has the limit of what it is doing.
        """
        if watched.finished or watched.failure is not None or watched.process.is_gone:
            return None
        now, silence = time.monotonic(), self._timeouts["silence"]
        if watched.role == "coordinator":
            silence *= _COORDINATOR_PATIENCE
        call = watched.process.status.call
        if call in _STARTING and now - watched.last_active > silence:
            return f"did not start within {silence:g} s: it does nothing"
        limit = self._stagnation.limit(watched)
        quiet = now - watched.last_heard
        if quiet > max(limit, silence) or (quiet > silence and now - watched.last_active > silence):
            return f"fell silent: nothing was received from it for {quiet:.0f} s"
        return None

    def _suspects(self) -> list[RankStatus]:
        """All but workers that may be lost and have not failed."""
        return [watched for watched in self._watched if watched.is_needed or watched.failure]

    def _explain(self) -> RunFailedError:
        if all(suspicion(watched)[0] >= PEERS_FAILED for watched in self._suspects()):
            # the others have timed out waiting for it
            self._stagnation.blame_slowest(time.monotonic())
        culprit = min(self._suspects(), key=suspicion)
        before = _size(culprit.process.log)
        for watched in self._watched:
            if watched.started and (watched is not culprit or watched.failure is None):
                watched.process.request_stacks()
        self._read_for(_STACKS_SECONDS)
        if culprit.failure is None:
            self._await_words(culprit, before)
        return run_failure(culprit, self._watched)

    def _await_words(self, culprit: RankStatus, before: int) -> None:
        """Reads on until its log has grown, if it can be expected to write to it."""
        patience = Deadline(_MOST_STACKS_SECONDS)
        has_listener = time.monotonic() - culprit.last_heard < _RECENT_SECONDS
        can_write = has_listener and not culprit.process.is_stopped
        while can_write and not culprit.process.is_gone and not patience.is_over:
            if _size(culprit.process.log) > before:
                return
            self._read_for(_STACKS_SECONDS)

    def _gather(self) -> None:
        """Lets the other processes report what the failure did to them."""
        patience = Deadline(_GRACE_SECONDS)
        while not patience.is_over:
            self._poll(self._poll_seconds)
            self._failed()
            if all(w.failure or w.finished or w.died_at for w in self._watched):
                return

    def _read_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self._selector.get_map():
                return
            self._poll(left)


def _size(log: Path) -> int:
    """Bytes of it; none where it is not there."""
    try:
        return log.stat().st_size
    except OSError:
        return 0
