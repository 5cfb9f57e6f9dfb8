"""How the processes of a run are killed in the middle of it, one after the other."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Moment = tuple[str, int]
"""`batch` or `write`, and how many of them a process is let: writes are files and folders that it syncs."""


FIRST = range(9, 12)
"""Batches that the first to die is let: a checkpoint that is due every third step is there then."""
EARLY = {"batch": range(1, 5), "write": range(14)}
"""The life of a process has these also where others have died before it."""


def moments(seed: str, kills: int, slices: int) -> list[Moment]:
    """Random ones, where a process has so many slices of a batch; every other is while it writes."""
    draw = random.Random(seed)
    kinds = itertools.islice(itertools.cycle(("batch", "write")), kills)
    found = [(kind, draw.choice(EARLY[kind])) for kind in kinds]
    found[0] = ("batch", draw.choice(FIRST))
    return [(kind, count * slices if kind == "batch" else count) for kind, count in found]


@dataclasses.dataclass
class Killer:
    """A transform that changes no sample, and kills the process in which a moment has come.

    The processes of one start have the same moment, and the first to come there is killed; those of the next
    start have the next one.

    Attributes:
        folder: With a file for each moment that is to come.
        is_armed: Whether it counts yet.
        due: The moment of this process, of which the first call reads.
        calls: So many batches were seen.
        writes: So many files and folders were synced.
    """

    folder: Path
    is_armed: bool = True
    due: Path | None = None
    calls: int = 0
    writes: int = 0

    @classmethod
    def at(cls, moments: Sequence[Moment], folder: Path) -> Killer:
        """Makes the files."""
        folder.mkdir(parents=True)
        for number, (what, count) in enumerate(moments):
            (folder / f"{number}-{what}-{count}").touch()
        return cls(folder)

    def __call__(self, inputs: Any, targets: Any, draws: Any) -> tuple[Any, Any]:
        if self.is_armed:
            self._count()
        return inputs, targets

    def _count(self) -> None:
        if not self.calls:
            self._read()
        self._look("batch", self.calls)
        self.calls += 1

    def _read(self) -> None:
        self.due = next(iter(sorted(self.folder.iterdir())), None)
        sync = os.fsync

        def watched(descriptor: int) -> None:
            self._look("write", self.writes)
            self.writes += 1
            sync(descriptor)

        os.fsync = watched

    def _look(self, what: str, count: int) -> None:
        """Kills this process if the moment has come, and no other process was killed in it."""
        if self.due is None or not self.due.name.endswith(f"-{what}-{count}"):
            return
        try:
            self.due.unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
