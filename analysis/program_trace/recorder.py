"""Writes the trace of one process of a program; runs inside that program."""

from __future__ import annotations

import atexit
import json
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from isotrain.analysis.parity.tensor_sketch import fingerprint

FORMAT = 1
HEADER = "process"
"""Kind of the first line of a trace file; all others are of kind `step`."""


class Recorder:
    """Writes a line of JSON for each step of an optimizer; a `ProgramRecorder`.

    Attributes:
        is_recording: Whether no optimizer has taken a step, or one has taken fewer than `steps`.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        """Writes nothing yet.

        Args:
            folder: Folder of the trace, with a file for each process that trains.
            steps: Number of steps of each optimizer to record.
        """
        self.is_recording = True
        self._folder = folder
        self.steps = steps
        self._counts: dict[int, int] = {}
        self._events: list[dict[str, Any]] = []
        self._rank, self._processes = 0, 1
        self._file: TextIO | None = None
        atexit.register(self.end)

    def wants(self, optimizer: int) -> bool:
        """Whether fewer than `steps` steps of an optimizer have been written."""
        return self._counts.get(optimizer, 0) < self.steps

    def of_another_replica(self) -> Recorder:
        """A recorder of as many steps, which writes another file."""
        return Recorder(self._folder, self.steps)

    def set_rank(self, rank: int, processes: int) -> None:
        """Tells the process's rank and the number of processes."""
        self._rank, self._processes = rank, processes

    def event(self, kind: str, **facts: Any) -> None:
        """Notes an event before the next step."""
        self._events.append({"event": kind, **facts})

    def rows(self, arrays: list[np.ndarray]) -> list[int]:
        """A CRC-32 of the bytes of each sample."""
        hashes = [0] * min(len(array) for array in arrays)
        for array in map(np.ascontiguousarray, arrays):
            hashes = [zlib.crc32(array[i].tobytes(), crc) for i, crc in enumerate(hashes)]
        return hashes

    def fingerprints(self, arrays: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
        """Fingerprints as `parity` has them."""
        return {name: fingerprint(array).to_list() for name, array in arrays.items()}

    def step(self, optimizer: int, facts: Mapping[str, Any]) -> None:
        """Writes a step with the events before it."""
        step = self._counts.get(optimizer, 0)
        self._counts[optimizer] = step + 1
        events, self._events = self._events, []
        self._write(
            {"kind": "step", "optimizer": optimizer, "step": step, "events": events, **facts}
        )
        self.is_recording = min(self._counts.values()) < self.steps

    def end(self) -> None:
        """Writes the events after the last step, such as an evaluation."""
        if self._file is not None and self.is_recording and self._events:
            self._write({"kind": "end", "events": self._events})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            name = f"rank-{self._rank}-{os.getpid()}.jsonl"
            self._file = (self._folder / name).open("w")
            header = {
                "format": FORMAT,
                "rank": self._rank,
                "processes": self._processes,
                "command": sys.argv,
            }
            self._write({"kind": HEADER, **header})
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
