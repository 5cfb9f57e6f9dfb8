"""Times at which a traced step's actions ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

import tensorflow as tf

from isotrain.plugin import ExecutedAction


class ActionTimes:
    """End times of the actions of a step, by the graph's clock, in seconds."""

    def __init__(self, times: Sequence[tf.Tensor], names: Sequence[str]) -> None:
        """Measures the offset between the graph's clock and `time.perf_counter`.

        Args:
            times: Seconds since 1970 (float64 scalars): when the first action began, and when each ended;
                empty if not measured.
            names: Names of the actions.
        """
        self._times, self._names = times, names
        self._clock_offset = time.perf_counter() - time.time()

    def executed(self) -> list[ExecutedAction]:
        """The actions, each of which began when the one before ended."""
        ends = [float(end) + self._clock_offset for end in self._times]
        names = self._names if ends else ()
        return [ExecutedAction(*each) for each in zip(names, ends[:-1], ends[1:], strict=True)]
