"""A call that takes too long, and who is to blame for it: the process that is furthest behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence

from isotrain.core.contracts.reporter import AWAITING_OTHERS, BETWEEN_CALLS
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus
from isotrain.core.launching.supervision.monitored_process import MonitoredProcess


class CpuStarvation:
    """The waiting for processors of a run's processes while one of them waits for the others.

    It is read only where such a call already takes long: runs that get on pay nothing for it.
    """

    def __init__(self, processes: Sequence[MonitoredProcess]) -> None:
        """Has read nothing yet.

        Args:
            processes: Of the run, in the order of their ranks.
        """
        self._processes = processes
        self._call: Hashable = None
        self._before: list[Mapping[int, float]] = []

    def of(self, rank: int, call: Hashable) -> float:
        """Seconds in which the thread of a process that lacked a processor longest did so.

        Threads may wait at once, and one of them never waits for longer than time passes.

        Args:
            rank: Whose.
            call: Which one takes long; counted is what was waited since the first question about it.
        """
        if call != self._call:
            self._call, self._before = call, [each.waits for each in self._processes]
        before = self._before[rank]
        waits = self._processes[rank].waits.items()
        return max((seconds - before.get(thread, 0.0) for thread, seconds in waits), default=0.0)


_MOST_STARVED = 3.0
"""Times the limit of a call, which lack of a processor excuses at most: what spins lacks one too."""
_PAUSES = 64


class HangDetector:
    """Looks whether the processes of a run get on."""

    def __init__(self, processes: Sequence[RankStatus], timeouts: Mapping[str, float]) -> None:
        """Has seen nothing yet.

        Args:
            processes: Of the run, in the order of their ranks.
            timeouts: Seconds: `start`, `progress`.
        """
        self._processes = processes
        self._timeouts = timeouts
        self._starvation = CpuStarvation([watched.process for watched in processes])
        self._pauses = deque[tuple[float, float]](maxlen=_PAUSES)
        """When each had ended, and its seconds; the last of them."""

    def find(self, now: float) -> None:
        """Where a call takes too long, takes the process that is furthest behind for lost.

        Args:
            now: By `time.monotonic`.
        """
        late = self._lateness(now) > 0
        if late and not any(w.failure or (w.lost and w.is_needed) for w in self._processes):
            self.blame_slowest(now)

    def excuse(self, seconds: float) -> None:
        """Does not count time in which the launcher itself did not run, which has just passed."""
        self._pauses.append((time.monotonic(), seconds))

    def _excused(self, since: float) -> float:
        """Seconds of pauses that ended after a moment."""
        return sum(seconds for ended, seconds in self._pauses if ended > since)

    def blame_slowest(self, now: float) -> None:
        """Takes the process that is furthest behind for lost, unless what became of it is known."""
        behind = self._last()
        if behind.failure is None and not behind.process.is_gone:
            behind.lost = f"made no progress for {now - behind.process.status.since:.0f} s"

    def limit(self, watched: RankStatus) -> float:
        """Of a process's call, in seconds."""
        return self._timeouts["progress" if watched.ready else "start"]

    def _last(self) -> RankStatus:
        """The process that is furthest behind, for which the others may wait."""
        return min((w for w in self._processes if w.has_session and not w.finished), key=_progress)

    def _lateness(self, now: float) -> float:
        """Seconds by which the call that is most over its limit is so; user code between calls has none.

        Those do not count in which the process that it may wait for lacked a processor.
        """
        waiting = [watched for watched in self._processes if _is_in_a_call(watched)]
        if not waiting:
            return 0.0
        latest = min(waiting, key=lambda w: self.limit(w) + w.process.status.since)
        limit, status = self.limit(latest), latest.process.status
        late = now - status.since - limit - self._excused(status.since)
        if late < -limit / 2:
            return late
        starved = self._starvation.of(self._last().rank, (latest.rank, status.step, status.call))
        return late - min(starved, now - status.since, _MOST_STARVED * limit)


def _is_in_a_call(watched: RankStatus) -> bool:
    """Whether it is in a call of a session that has a limit."""
    is_at_work = watched.has_session and watched.started and not watched.finished
    return is_at_work and watched.process.status.call != BETWEEN_CALLS


def _progress(watched: RankStatus) -> tuple[int, bool, bool]:
    """Orders processes by how far they are; one in user code is behind those that wait for it."""
    step, _, call = watched.process.status
    return -1 if step is None else step, call != BETWEEN_CALLS, call == AWAITING_OTHERS
