"""Activity of a process (CPU time, waiting for a core, bytes read), to tell a busy one from a stuck one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_READ_BYTES_PER_SECOND = 1e6


def activity(pid: int) -> float:
    """Activity of a process in seconds: CPU time used or waited for, and a second per megabyte read.

    Waiting counts because a process that hardly gets a core of a busy machine is not idle. 0 if the process
    is gone.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        read = activity_of_bytes(_bytes_read(process))
        return times.user + times.system + sum(waits(pid).values()) + read
    return 0.0


def activity_of_bytes(count: float) -> float:
    """Activity in seconds of reading so many bytes: a second per megabyte."""
    return count / _READ_BYTES_PER_SECOND


def waits(pid: int) -> dict[int, float]:
    """Seconds that each thread was runnable without a core, by thread id; empty without schedstat."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return {int(file.parent.name): _waited_nanoseconds(file) / 1e9 for file in files}


def _waited_nanoseconds(schedstat: Path) -> int:
    try:
        _, nanoseconds, _ = schedstat.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # the thread has ended, or the kernel has no figures
        return 0
    return int(nanoseconds)


def _bytes_read(process: psutil.Process) -> float:
    try:
        counters = process.io_counters()
    except (AttributeError, psutil.Error):  # not on every system
        return 0.0
    return float(counters.read_bytes + counters.read_chars)
