"""For how long a process could not do its part, for it had no processor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from isotrain.core.launching.watched_process import MonitoredProcess


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
