"""How much a process has done, as the system sees it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_READ_BYTES_PER_SECOND = 1e6


def activity(pid: int) -> float:
    """Seconds of processor time it has used or waited for, plus a second for each megabyte it has read.

    One that waits for a processor on a busy machine, and hardly gets one, is not idle.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        read = activity_of_bytes(_bytes_read(process))
        return times.user + times.system + sum(waits(pid).values()) + read
    return 0.0


def activity_of_bytes(count: float) -> float:
    """A second for each megabyte."""
    return count / _READ_BYTES_PER_SECOND


def waits(pid: int) -> dict[int, float]:
    """Seconds in which each of its threads was ready, and had no processor; none where no system tells."""
    told = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return {int(each.parent.name): _waited_by(each) / 1e9 for each in told}


def _waited_by(schedstat: Path) -> int:
    """Nanoseconds of a thread."""
    try:
        _, nanoseconds, _ = schedstat.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # it has ended, or the system does not tell
        return 0
    return int(nanoseconds)


def _bytes_read(process: psutil.Process) -> float:
    try:
        counters = process.io_counters()
    except (AttributeError, psutil.Error):  # not every system tells
        return 0.0
    return float(counters.read_bytes + counters.read_chars)
