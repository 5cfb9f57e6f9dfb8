"""Hang detection: finds a call that exceeds its timeout, and blames the rank that is furthest behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence

from isotrain.core.contracts.reporter import (
    AWAITING_OTHERS,
    BETWEEN_CALLS,
    WAITING_FOR_MEMBERS,
    WAITING_TO_JOIN,
)
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus


class CpuStarvation:
    """CPU starvation (time runnable without a core) of rank processes since a slow call was first seen.

    It is measured only once a call takes long: runs that make progress pay nothing for it.
    """

    def __init__(self, processes: Sequence[RankStatus]) -> None:
        """Measures nothing yet.

        Args:
            processes: Processes of the run by rank; later ones may be appended.
        """
        self._processes = processes
        self._call: Hashable = None
        self._waits_at_start: dict[int, Mapping[int, float]] = {}

    def of(self, rank: int, call: Hashable) -> float:
        """Seconds of starvation of a process: the maximum over its threads, which starve in parallel.

        Args:
            rank: Rank of the process.
            call: Identifies the slow call; starvation counts from the first query about it.
        """
        if call != self._call:
            self._call = call
            self._waits_at_start = {
                index: each.process.waits
                for index, each in enumerate(self._processes)
                if not each.left
            }
        at_start = self._waits_at_start.get(rank, {})
        waits = self._processes[rank].process.waits.items()
        return max((seconds - at_start.get(thread, 0.0) for thread, seconds in waits), default=0.0)


_STARVATION_LIMIT = 3.0
"""Maximum starvation that is excused, as a multiple of the call's timeout: a spinning process starves too."""
_MAX_PAUSES = 64


class HangDetector:
    """Detects that the processes of a run make no progress."""

    def __init__(self, processes: Sequence[RankStatus], timeouts: Mapping[str, float]) -> None:
        """Starts without observations.

        Args:
            processes: States of the run's processes by rank; later ones may be appended.
            timeouts: Timeouts of a call in seconds: `start` before a process is ready, `progress` after.
        """
        self._processes = processes
        self._timeouts = timeouts
        self._starvation = CpuStarvation(processes)
        self._pauses = deque[tuple[float, float]](maxlen=_MAX_PAUSES)
        """The last pauses: end (`time.monotonic`) and seconds of each."""
        self._newcomer_started = 0.0
        """Last time at which a newcomer of an elastic run was starting (`time.monotonic`)."""

    def find(self, now: float) -> None:
        """Marks the process that is furthest behind as lost if a call has exceeded its timeout.

        Args:
            now: Present time (`time.monotonic`).
        """
        if any(map(_is_starting, self._processes)):
            self._newcomer_started = now
        late = self._lateness(now) > 0
        present = [each for each in self._processes if not each.left and not each.joins]
        if late and not any(w.failure or (w.lost and w.is_needed) for w in present):
            self.blame_slowest(now)

    def excuse(self, seconds: float) -> None:
        """Excludes a pause of the launching process, which has just ended, from the timeouts."""
        self._pauses.append((time.monotonic(), seconds))

    def _paused_since(self, since: float) -> float:
        """Total seconds of the pauses that ended after a time."""
        return sum(seconds for ended, seconds in self._pauses if ended > since)

    def blame_slowest(self, now: float) -> None:
        """Marks the process that is furthest behind as lost, unless it has failed or ended."""
        slowest = self._slowest()
        if slowest.failure is None and not slowest.process.is_gone:
            slowest.lost = f"made no progress for {now - slowest.process.status.since:.0f} s"

    def limit(self, watched: RankStatus) -> float:
        """Timeout in seconds of a process's present call."""
        return self._timeouts["progress" if watched.ready else "start"]

    def _slowest(self) -> RankStatus:
        """The process that is furthest behind, for which others may wait."""
        return min((each for each in self._processes if each.is_awaited), key=_progress_key)

    def _lateness(self, now: float) -> float:
        """Seconds by which the latest call exceeds its timeout, less pauses and starvation; else negative.

        Starvation is that of the process for which the call may wait. User code between calls has no timeout.
        """
        waiting = [watched for watched in self._processes if _is_in_limited_call(watched)]
        if not waiting:
            return 0.0
        latest = min(waiting, key=lambda w: self.limit(w) + self._since(w))
        limit, since, status = self.limit(latest), self._since(latest), latest.process.status
        late = now - since - limit - self._paused_since(since)
        if late < -limit / 2:
            return late
        starved = self._starvation.of(self._slowest().rank, (latest.rank, status.step, status.call))
        return late - min(starved, now - since, _STARVATION_LIMIT * limit)

    def _since(self, watched: RankStatus) -> float:
        """Time from which the timeout of a process's present call counts.

        Members may wait for a newcomer, which has the timeout of the start.
        """
        status = watched.process.status
        waits = status.call == WAITING_FOR_MEMBERS
        return max(status.since, self._newcomer_started) if waits else status.since


def _is_starting(watched: RankStatus) -> bool:
    """Whether a process is a newcomer of an elastic run that does not wait to be let in yet."""
    return watched.joins and not watched.left and watched.process.status.call != WAITING_TO_JOIN


def _is_in_limited_call(watched: RankStatus) -> bool:
    """Whether a process is in a session's call with a timeout, and not in user code."""
    return watched.is_awaited and watched.started and watched.process.status.call != BETWEEN_CALLS


def _progress_key(watched: RankStatus) -> tuple[int, bool, bool]:
    """Sort key of processes by progress; a process in user code is behind those that wait for it."""
    step, _, call = watched.process.status
    return -1 if step is None else step, call != BETWEEN_CALLS, call == AWAITING_OTHERS
