"""Finds all processes of this machine that belong to a run, by session, ancestry and environment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from isotrain.core.contracts.process import VARIABLE

_CONTEXT_PREFIX = f"{VARIABLE}=".encode()


class _ProcStat(NamedTuple):
    """Fields of `/proc/<pid>/stat`: the parent's process id, and the start time in clock ticks since boot."""

    parent: int
    start_ticks: int


def run_processes(ranks: Collection[int], directories: Iterable[str]) -> list[psutil.Process]:
    """The rank processes, their sessions and descendants, and all others with the runs' process context.

    Args:
        ranks: Process ids of the ranks, which lead sessions of their own.
        directories: Run directories.
    """
    stats = {pid: stat for pid in psutil.pids() if (stat := _read_stat(pid)) is not None}
    first = min((stats[rank].start_ticks for rank in ranks if rank in stats), default=0)
    parents = {pid: stat.parent for pid, stat in stats.items() if stat.start_ticks >= first}
    texts = [json.dumps(directory).encode() for directory in directories]
    members = {pid for pid in parents if _session_of(pid) in ranks or _has_context_of(pid, texts)}
    processes = []
    for pid in members | _descendants(ranks, parents):
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(pid))
    return processes


def _read_stat(pid: int) -> _ProcStat | None:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        fields = stat.rpartition(b")")[2].split()  # the name may have parentheses and spaces
        return _ProcStat(int(fields[1]), int(fields[19]))
    return None


def _descendants(ranks: Iterable[int], parents: Mapping[int, int]) -> set[int]:
    """Process ids of the ranks and their descendants, except for those adopted by init."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    pids, left = set[int](), list(ranks)
    while left:
        pid = left.pop()
        if pid not in pids:
            pids.add(pid)
            left += children.get(pid, ())
    return pids


def _session_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def _has_context_of(pid: int, texts: Iterable[bytes]) -> bool:
    """Whether a process inherited the process context of a run, also if its parent is gone."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        contexts = [variable for variable in variables if variable.startswith(_CONTEXT_PREFIX)]
        return any(text in context for text in texts for context in contexts)
    return False
