"""How the processes of a run compare notes without the collectives that are being tested."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0

Arrays = Mapping[str, np.ndarray]


class FileExchange:
    """Arrays that every process of a run shows to all others, through files of the run directory."""

    def __init__(self, folder: Path, rank: int, processes: int) -> None:
        self._folder = folder
        self._rank = rank
        self._processes = processes
        self._uses = 0

    def all_gather(self, arrays: Arrays) -> list[dict[str, np.ndarray]]:
        """Gives the arrays of every process, by rank; returns once all have called it."""
        self._uses += 1
        own = self._path(self._rank)
        unfinished = own.with_suffix(".part.npz")
        np.savez(unfinished, **arrays)  # type: ignore[arg-type]
        unfinished.rename(own)
        return [self._read(self._path(rank)) for rank in range(self._processes)]

    def all_gather_rows(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As `all_gather`, for one array per local replica: gives those of all replicas, in order."""
        shown = self.all_gather({f"{place:03}": row for place, row in enumerate(rows)})
        return [arrays[name] for arrays in shown for name in sorted(arrays)]

    def _path(self, rank: int) -> Path:
        return self._folder / f"board-{self._uses}-{rank}.npz"

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name} did not appear: that process is not at this check")
            time.sleep(_POLL_SECONDS)
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
