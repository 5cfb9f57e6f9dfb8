"""Writes the trace of one process of a program; runs inside that program."""

from __future__ import annotations

import atexit
import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from isotrain.analysis.parity.tensor_sketch import fingerprint
from isotrain.analysis.parity.trace import INITIAL_FILE
from isotrain.analysis.program_trace.keras_axes import channels_first, in_torch_order
from isotrain.core.system.hardware import cores

FORMAT = 2
HEADER = "process"
"""Kind of the first line of a trace file; all others are of kind `step`."""
_LARGE = 1 << 18
"""Number of elements from which on threads are worth their start."""
_THREADS = 4


def sample_hashes(arrays: Sequence[np.ndarray]) -> list[int]:
    """A CRC-32 of each sample of a batch: of the rows of all arrays, integers as int64."""
    hashes = [0] * min(len(array) for array in arrays)
    for array in arrays:
        values = array.astype(np.int64) if array.dtype.kind in "bui" else array
        whole = np.ascontiguousarray(values)
        hashes = [zlib.crc32(row, crc) for row, crc in zip(whole, hashes, strict=False)]
    return hashes


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
        self._has_initial = False
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

    def rows(self, arrays: list[np.ndarray], *, channels_last: bool = False) -> list[int]:
        """A CRC-32 of each sample, of images with their channels first."""
        return sample_hashes([*map(channels_first, arrays)] if channels_last else arrays)

    def fingerprints(self, arrays: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
        """Fingerprints as `parity` has them, of tensors with their axes in torch's order.

        Those of large ones are computed by several threads. These end with the call: the program may fork.
        """

        def taken(name: str) -> list[Any]:
            return fingerprint(in_torch_order(name, arrays[name])).to_list()

        large = {name for name, array in arrays.items() if array.size >= _LARGE}
        prints = {name: taken(name) for name in arrays if name not in large}
        with ThreadPoolExecutor(min(_THREADS, cores())) as pool:
            prints |= zip(large, pool.map(taken, large), strict=True)
        return {name: prints[name] for name in arrays}

    def start(
        self, weights: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Facts of what an optimizer starts from; rank 0 keeps it as it is, of several optimizers in turn."""
        kinds = {"trainable": weights, "non-trainable": state}
        arrays = {
            f"{kind}/{name}": in_torch_order(name, array)
            for kind, by_name in kinds.items()
            for name, array in by_name.items()
        }
        if not self._rank:
            self._keep_initial(arrays)
        shapes = {key.partition("/")[2]: array.shape for key, array in arrays.items()}
        return {"initial": self.fingerprints(weights), "shapes": shapes}

    def _keep_initial(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Adds weights and buffers to the file of what training starts from; those in it stay."""
        file = self._folder / INITIAL_FILE
        if self._has_initial:
            with np.load(file, allow_pickle=False) as archive:
                kept = dict(archive)
            arrays = {**kept, **{key: array for key, array in arrays.items() if key not in kept}}
        np.savez(file, **arrays)  # type: ignore[arg-type]
        self._has_initial = True

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
