"""Supervisor of a run's processes: reads their events, and detects that one has failed, died or hangs."""

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
    Interrupted,
    OnEvent,
    Output,
    ProcessEvent,
    Ready,
    Waiting,
    WorkerLost,
    read_event,
)
from isotrain.core.contracts.reporter import WAITING_TO_JOIN
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.run_directory.pipes import read_available
from isotrain.core.launching.supervision.elastic_members import ElasticMembers
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
"""Time after a first failure in which the other processes may still report theirs."""
_STACKS_SECONDS = 0.3
_MAX_STACKS_SECONDS = 3.0
"""Limit for a responsive process to begin to write its stacks, on a busy machine."""
_RESPONSIVE_SECONDS = 2.0
_LAST_EVENTS_SECONDS = 0.3
_COORDINATOR_FACTOR = 1.5
"""Multiple of the silence timeout for a parameter-server coordinator.

Its native code may wait for a silent worker, which must be ended first.
"""
_ACTIVITY_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
_NEWS = Finished | Failed | Interrupted | Waiting
"""Events after which all processes are checked at once."""
_STARTING_CALLS = ("start", "read job")
"""Calls in which a process waits for no other: without activity in them it is lost."""


def _ignore() -> None:
    """Default `on_ready`."""


class Supervisor:
    """Supervises all processes of a run until they have finished or one has failed."""

    def __init__(
        self,
        processes: Sequence[MonitoredProcess],
        timeouts: Mapping[str, float],
        on_event: OnEvent,
        on_ready: Callable[[], None] = _ignore,
        ignored_log_lines: Sequence[str] = (),
        poll_seconds: float = 0.1,
        members: ElasticMembers | None = None,
    ) -> None:
        """Watches started processes.

        Args:
            processes: Processes in rank order.
            timeouts: Seconds: `silence` without events, `start` and `progress` of a call.
            on_event: Called with every event but heartbeats, and with rank 0's output.
            on_ready: Called once, when all processes with a session are ready.
            ignored_log_lines: Patterns of the backend's log lines, see `Adapter.ignored_log_lines`.
            poll_seconds: Interval at which all processes are checked although none has reported an end.
            members: Members of an elastic run, which goes on without processes that are lost; None: another.
        """
        now = time.monotonic()
        self._ignored_log_lines = ignored_log_lines
        self._selector = selectors.DefaultSelector()
        self._watched: list[RankStatus] = []
        for process in processes:
            self._watch(process)
        self._hang_detector = HangDetector(self._watched, timeouts)
        self._timeouts = timeouts
        self._on_event = on_event
        self._on_ready = on_ready
        self._poll_seconds = poll_seconds
        self._members = members
        self._with_session = [watched for watched in self._watched if watched.has_session]
        self._were_ready = False
        self._has_news = False
        self._last_check = now
        self._last_poll = now
        self._last_activity_poll = now
        self._output = self._watched[0].process.output
        if self._output is not None:
            os.set_blocking(self._output, False)
            self._selector.register(self._output, selectors.EVENT_READ, None)

    def _watch(self, process: MonitoredProcess, *, joins: bool = False) -> None:
        """Watches a process that was started; `joins`: it is to join an elastic run."""
        now = time.monotonic()
        watched = RankStatus(
            process,
            last_heard=now,
            last_active=now,
            joins=joins,
            ignored_log_lines=self._ignored_log_lines,
        )
        self._watched.append(watched)
        self._selector.register(process.events, selectors.EVENT_READ, watched)

    def run(self) -> RunFailedError | None:
        """Supervises until the end of the run.

        Returns:
            None if all processes finished; otherwise the error, and the processes still run.
        """
        while True:
            self._poll(self._poll_seconds)
            if not self._is_check_due():
                continue
            if self._work_is_done():
                self._end_others()
                return None
            self._update_activities()
            self._hang_detector.find(time.monotonic())
            failed = self._failed()
            if self._members is not None:
                failed = self._change_members(self._members, failed)
            if failed:
                if not any(watched.lost for watched in self._suspects()):
                    self._await_other_failures()
                # if the work is done now, a server has only blamed finished ranks for leaving
                if not self._work_is_done():
                    return self._explain()

    def _change_members(
        self, members: ElasticMembers, failed: list[RankStatus]
    ) -> list[RankStatus]:
        """Goes on without failed processes and with new ones; returns those without which it cannot go on."""
        if failed:
            self._poll(0)  # what the others have sent before one was lost, such as that they train
            failed = self._failed()
        if failed and members.lose(failed, self._watched):
            failed = []
        change = members.regroup(self._watched)
        if change is not None:
            self._on_event(change)
        self._retire_lost(members)
        for process in members.recruit(self._watched):
            self._watch(process, joins=True)
        return [watched for watched in failed if not watched.left]

    def _retire_lost(self, members: ElasticMembers) -> None:
        """Frees what lost processes hold, once all that they have sent is read."""
        for watched in self._watched:
            if watched.left and not watched.is_retired and watched.process.is_gone:
                watched.is_retired = True
                self._read_events(watched)
                self._unregister(watched.process.events)
                if self._output is not None and self._output == watched.process.output:
                    self._relay_output()
                    self._unregister(self._output)
                    self._output = None
                members.retire(watched)

    def _is_check_due(self) -> bool:
        """Whether to check all processes now: checks take time, and some process always has events."""
        now = time.monotonic()
        if not self._has_news and now - self._last_check < self._poll_seconds:
            return False
        self._has_news, self._last_check = False, now
        return True

    def _work_is_done(self) -> bool:
        """Whether every process with a session has finished; workers and servers end by themselves."""
        return not any(watched.is_awaited for watched in self._watched)

    def _end_others(self) -> None:
        """Kills processes that do not end by themselves: suspended servers, and those that were to join."""
        for watched in self._watched:
            if watched.joins and not watched.left:
                watched.process.end()
                watched.left = True
            elif not watched.has_session and watched.process.is_stopped:
                watched.process.end()

    def cause_of_end(self) -> RunFailedError | None:
        """Diagnoses whether a rank's death is why a signal ended this process: schedulers then signal all.

        Reads events for a moment before.

        Returns:
            The error with which the run ends; None if no rank has died silently.
        """
        self._read_for(_LAST_EVENTS_SECONDS)
        dead = [watched for watched in self._failed() if watched.died_silently]
        return run_failure(min(dead, key=suspicion), self._watched) if dead else None

    @property
    def finished_ranks(self) -> list[int]:
        """Ranks at the start of the processes with a session that have finished, in order."""
        return [each.rank for each in self._watched if each.has_session and each.finished]

    def drain(self) -> None:
        """Reads all remaining events once the processes are gone, and closes the selector."""
        self._poll(0)
        self._selector.close()

    def _poll(self, timeout: float) -> None:
        """Handles events and output for at most `timeout` seconds."""
        started = time.monotonic()
        self._exclude_pause(started - self._last_poll)
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._relay_output()
            else:
                self._read_events(key.data)
        self._exclude_pause(time.monotonic() - started - timeout)
        self._last_poll = time.monotonic()

    def _exclude_pause(self, pause: float) -> None:
        """Excludes a suspension of this process or the machine from all timeouts."""
        if pause > _PAUSE_SECONDS:
            for watched in self._watched:
                watched.excuse(pause)
            self._hang_detector.excuse(pause)

    def _read_events(self, watched: RankStatus) -> None:
        lines = watched.process.read_lines()
        if lines is None:
            self._has_news = True
            self._unregister(watched.process.events)
            return
        for line in lines:
            parsed = read_event(line)
            event = parsed if isinstance(parsed, ProcessEvent) else None
            watched.update(event)
            if event is not None and not isinstance(event, Heartbeat):
                watched.last_active = watched.last_heard
                members = self._members
                if members is None or members.note(watched.rank, event, self._watched):
                    self._on_event(self._completed(event))
            self._note_ready(event)
            self._has_news |= isinstance(event, _NEWS)

    def _note_ready(self, event: ProcessEvent | None) -> None:
        """Calls `on_ready` once; processes of elastic runs are ready again in each process group."""
        is_first = isinstance(event, Ready) and not self._were_ready
        if is_first and all(each.ready for each in self._with_session):
            self._were_ready = True
            self._on_ready()

    def _completed(self, event: ProcessEvent) -> ProcessEvent:
        """Completes an event by what only the launching process knows: the cause of a lost worker."""
        if isinstance(event, WorkerLost):
            return replace(event, cause=self._cause(event.lost_rank))
        return event

    def _cause(self, rank: int) -> str | None:
        """Cause of the loss of a worker; None if unknown."""
        watched = self._watched[rank]
        deadline = time.monotonic() + _LAST_EVENTS_SECONDS
        while not watched.process.is_gone and time.monotonic() < deadline:
            time.sleep(0.01)  # its connection closes before the process ends
            self._read_events(watched)
        if watched.lost is None and not watched.process.is_gone:
            return None
        return watched.lost or verdict(watched)

    def _unregister(self, source: Any) -> None:
        """Stops reading a pipe whose other end is closed."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _relay_output(self) -> None:
        assert self._output is not None
        chunk = read_available(self._output)
        if chunk is None:
            self._unregister(self._output)
            return
        self._on_event(Output(text=chunk.decode(errors="replace")))

    def _update_activities(self) -> None:
        """Updates the activity of silent and starting processes, at most twice a second."""
        now = time.monotonic()
        if now - self._last_activity_poll < _ACTIVITY_POLL_SECONDS:
            return
        self._last_activity_poll = now
        for watched in self._watched:
            quiet = now - watched.last_heard > 2 * _ACTIVITY_POLL_SECONDS
            if not watched.is_over and (quiet or watched.process.status.call in _STARTING_CALLS):
                watched.update_activity()

    def _failed(self) -> list[RankStatus]:
        """Checks every process, and returns those that have failed."""
        return [watched for watched in self._watched if self._has_failed(watched)]

    def _has_failed(self, watched: RankStatus) -> bool:
        if watched.is_over:
            return False
        if watched.process.is_gone:
            self._read_events(watched)  # its last events may still be in the pipe
            watched.died_at = watched.died_at or time.time()
        if watched.lost is None:
            watched.lost = self._loss_reason(watched)
            if watched.lost is not None and not watched.is_needed:
                watched.process.end()  # the run continues without it
        if not watched.is_needed:
            return watched.failure is not None
        return watched.failure is not None or watched.died_silently or watched.lost is not None

    def _loss_reason(self, watched: RankStatus) -> str | None:
        """Reason why a running process must be considered lost; None if it need not.

        It is lost after `silence` seconds without an event. A process that sends no events but is active is
        only slow, and has the timeout of its present call instead.
        """
        if watched.is_over or watched.failure is not None or watched.process.is_gone:
            return None
        now, silence = time.monotonic(), self._timeouts["silence"]
        if watched.role == "coordinator":
            silence *= _COORDINATOR_FACTOR
        call = watched.process.status.call
        if call in _STARTING_CALLS and now - watched.last_active > silence:
            return f"did not start within {silence:g} s: it does nothing"
        if watched.joins and watched.started and call != WAITING_TO_JOIN:
            taken = now - watched.process.status.since
            if taken > self._timeouts["start"]:
                return f"did not come up: it is in call {call!r} for {taken:.0f} s"
        limit = self._hang_detector.limit(watched)
        quiet = now - watched.last_heard
        if quiet > max(limit, silence) or (quiet > silence and now - watched.last_active > silence):
            return f"fell silent: nothing was received from it for {quiet:.0f} s"
        return None

    def _suspects(self) -> list[RankStatus]:
        """All processes but workers that the run can lose and that have not failed."""
        present = [watched for watched in self._watched if not watched.left and not watched.joins]
        return [watched for watched in present if watched.is_needed or watched.failure]

    def _explain(self) -> RunFailedError:
        """Finds the culprit, requests the stacks of all processes, and returns the error."""
        if all(suspicion(watched)[0] >= PEERS_FAILED for watched in self._suspects()):
            # the others have timed out waiting for it
            self._hang_detector.blame_slowest(time.monotonic())
        culprit = min(self._suspects(), key=suspicion)
        log_bytes = _size(culprit.process.log)
        for watched in self._watched:
            if watched.started and (watched is not culprit or watched.failure is None):
                watched.process.request_stacks()
        self._read_for(_STACKS_SECONDS)
        if culprit.failure is None:
            self._await_log_growth(culprit, log_bytes)
        return run_failure(culprit, self._watched)

    def _await_log_growth(self, culprit: RankStatus, log_bytes: int) -> None:
        """Reads events until the culprit's log has grown, if the process is able to write its stacks."""
        deadline = Deadline(_MAX_STACKS_SECONDS)
        is_responsive = time.monotonic() - culprit.last_heard < _RESPONSIVE_SECONDS
        can_write = is_responsive and not culprit.process.is_stopped
        while can_write and not culprit.process.is_gone and not deadline.is_over:
            if _size(culprit.process.log) > log_bytes:
                return
            self._read_for(_STACKS_SECONDS)

    def _await_other_failures(self) -> None:
        """Waits for the other processes to report how the failure affected them."""
        deadline = Deadline(_GRACE_SECONDS)
        while not deadline.is_over:
            self._poll(self._poll_seconds)
            self._failed()
            if all(w.failure or w.is_over or w.joins or w.died_at for w in self._watched):
                return

    def _read_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self._selector.get_map():
                return
            self._poll(left)


def _size(log: Path) -> int:
    """Size of a log in bytes; 0 if it does not exist."""
    try:
        return log.stat().st_size
    except OSError:
        return 0
