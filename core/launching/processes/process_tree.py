"""All processes of this machine that belong to a run, found in one look at each."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from isotrain.core.contracts.process import VARIABLE

_MARK = f"{VARIABLE}=".encode()


class _Seen(NamedTuple):
    """What the system says of a process: its parent's number, and when it began, in ticks since the boot."""

    parent: int
    began: int


def run_processes(ranks: Collection[int], directories: Iterable[str]) -> list[psutil.Process]:
    """The ranks, their descendants, and whatever else has the mark of one of the runs.

    Args:
        ranks: Numbers of the ranks, which lead sessions of their own.
        directories: Of the runs.
    """
    seen = {pid: each for pid in psutil.pids() if (each := _seen(pid)) is not None}
    first = min((seen[rank].began for rank in ranks if rank in seen), default=0)
    later = {pid: each.parent for pid, each in seen.items() if each.began >= first}
    texts = [json.dumps(directory).encode() for directory in directories]
    marked = {pid for pid in later if _session(pid) in ranks or _is_marked(pid, texts)}
    found = []
    for pid in marked | _family(ranks, later):
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def _seen(pid: int) -> _Seen | None:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        told = stat.rpartition(b")")[2].split()  # its own name may have brackets and spaces
        return _Seen(int(told[1]), int(told[19]))
    return None


def _family(ranks: Iterable[int], parents: Mapping[int, int]) -> set[int]:
    """The ranks and all that these started, as far as it has not lost its parents."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, left = set[int](), list(ranks)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children.get(pid, ())
    return found


def _session(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def _is_marked(pid: int, texts: Iterable[bytes]) -> bool:
    """Whether it inherited a run's variable, though its parent may be gone."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        marks = [each for each in variables if each.startswith(_MARK)]
        return any(text in mark for text in texts for mark in marks)
    return False
