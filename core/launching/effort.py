"""How much a process has done, as the system sees it."""

from __future__ import annotations

import contextlib

import psutil

_READ_BYTES_PER_SECOND = 1e6


def effort(pid: int) -> float:
    """Seconds of processor time it has used, plus a second for each megabyte it has read."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user + times.system + effort_of_bytes(_bytes_read(process))
    return 0.0


def effort_of_bytes(count: float) -> float:
    """A second for each megabyte."""
    return count / _READ_BYTES_PER_SECOND


def _bytes_read(process: psutil.Process) -> float:
    try:
        counters = process.io_counters()
    except (AttributeError, psutil.Error):  # not every system tells
        return 0.0
    return float(counters.read_bytes + counters.read_chars)
