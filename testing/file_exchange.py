"""Gathers arrays between processes through files, independent of the collectives under test."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0

Arrays = Mapping[str, np.ndarray]


class FileExchange:
    """All-gather of arrays between the processes of a run, through files in a shared folder."""

    def __init__(self, folder: Path, rank: int, processes: int) -> None:
        self._folder = folder
        self._rank = rank
        self._processes = processes
        self._uses = 0

    def all_gather(self, arrays: Arrays) -> list[dict[str, np.ndarray]]:
        """Gathers the arrays of every process, by rank. Collective.

        Args:
            arrays: Arrays by name, any shapes and dtypes; they may differ between processes.

        Raises:
            TimeoutError: A process did not call it within 60 seconds.
        """
        self._uses += 1
        path = self._path(self._rank)
        unfinished = path.with_suffix(".part.npz")
        np.savez(unfinished, **arrays)  # type: ignore[arg-type]
        unfinished.rename(path)
        return [self._read(self._path(rank)) for rank in range(self._processes)]

    def all_gather_rows(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gathers an array of any shape per local replica; returns those of all, in order. Collective."""
        by_rank = self.all_gather({f"{index:03}": row for index, row in enumerate(rows)})
        return [arrays[name] for arrays in by_rank for name in sorted(arrays)]

    def _path(self, rank: int) -> Path:
        return self._folder / f"board-{self._uses}-{rank}.npz"

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        """Arrays of a file by name, any shapes, once it exists."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name} did not appear: that process is not at this check")
            time.sleep(_POLL_SECONDS)
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
