"""Streams of batches of any sizes, and what the loader makes of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np

from isotrain.core.data.batch import Batch
from isotrain.core.data.loader import Loader
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.json_records import record

INPUTS = np.arange(40, dtype=np.float32).reshape(20, 2)
TARGETS = np.arange(20)
CUTS = (3, 7, 1, 9)


class Uneven:
    """Gives the samples in batches of 3, 7, 1 and 9, from another one on in each reading."""

    def __init__(self, shift: int = 0) -> None:
        self.shift, self.readings = shift, 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rows = np.roll(np.arange(20), self.readings * self.shift)
        self.readings += 1
        for start, stop in zip(np.cumsum((0, *CUTS)), np.cumsum(CUTS), strict=False):
            yield INPUTS[rows[start:stop]], TARGETS[rows[start:stop]]


def loader(source: object, **options: object) -> Loader:
    chosen: dict = {
        "global_batch_size": 8,
        "replicas": 1,
        "seed": 5,
        "drop_remainder": False,
        "prefetch": 0,
        "epochs": 2,
    } | options
    return Loader(source, local_replicas=range(chosen["replicas"]), **chosen)


def facts(batch: Batch) -> tuple:
    slices = [
        (np.asarray(p.inputs).tolist(), np.asarray(p.targets).tolist(), p.count, p.weight)
        for own in batch.slices
        for p in own
    ]
    return batch.epoch, batch.index, batch.step, batch.size, batch.even, slices


def given_by(source: object, **options: object) -> list[tuple]:
    return [facts(batch) for batch in loader(source, **options)]


class Pairs:
    """A map-style data set whose samples are made one by one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return INPUTS[index], index


def kept(mark: StreamState | None) -> StreamState | None:
    """A mark as a checkpoint gives it back."""
    plain = json.loads(json.dumps(None if mark is None else dataclasses.asdict(mark)))
    return None if plain is None else record(StreamState, plain, "run.json")
