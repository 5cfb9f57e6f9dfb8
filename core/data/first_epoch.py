"""The first epoch of a stream, read before its time to count the samples."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from isotrain.core.data.arrays import as_array, as_inputs_and_targets
from isotrain.core.data.reading import rows_of
from isotrain.core.data.trees import leaves, map_tree
from isotrain.core.errors import DataError

MOST_BYTES = 64 * 1024**2
"""Of an epoch that is kept."""
SILENT_SECONDS = 10.0
"""How long an epoch is read before a person is told: nobody else knows whether it ends."""
_STILL_COUNTING = (
    "data: the stream is still being read through to count its samples, {} until now. One that never ends"
    " must be given an end, as by itertools.islice(batches, number). Of one that is large,"
    " isotrain.sources.stream(batches, samples=N) says how many an epoch has, and nothing is read for that."
)


class FirstEpoch:
    """What was read: a stream that shuffles itself, or draws random numbers, gives another epoch next time.

    Attributes:
        samples: In it.
        batches: Copies of its batches, as streams may fill the same arrays again; None of a large one.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        """Reads it through."""
        self.samples = 0
        self.batches: list[Any] | None = []
        room = MOST_BYTES
        silent_until = time.monotonic() + SILENT_SECONDS
        for batch in batches:
            self.samples += rows_of(batch)
            if time.monotonic() > silent_until:
                silent_until = float("inf")
                warnings.warn(_STILL_COUNTING.format(self.samples), stacklevel=2)
            if self.batches is not None:
                copy, size = _copied(batch)
                room -= size
                if copy is None or room < 0:
                    self.batches = None
                else:
                    self.batches.append(copy)


def _copied(batch: Any) -> tuple[Any, int]:
    """A batch of arrays of its own, and their bytes; None where it cannot be made arrays."""
    try:
        inputs, targets = as_inputs_and_targets(batch, "a batch of the stream")
        copy = map_tree(_array, (inputs, targets))
    except DataError:
        return None, 0
    return copy, sum(array.nbytes for _, array in leaves(copy, "") if array is not None)


def _array(leaf: Any) -> Any:
    return None if leaf is None else np.copy(as_array(leaf))
