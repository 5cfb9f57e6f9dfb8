"""A learning-rate schedule of Keras, asked for the rate of any step.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from typing import Any

import keras


class KerasSchedule:
    """Gives the rate of each update as `fit` would, computed on the processor."""

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule) -> None:
        self._schedule = schedule
        self._updates: Any = None

    def __call__(self, updates: int) -> float:
        """The rate of the update before which there were so many, in the type that Keras computes it in."""
        with keras.device("cpu"):
            if self._updates is None:
                self._updates = keras.Variable(0, dtype="int", trainable=False, name="updates")
            self._updates.assign(updates)
            rate = self._schedule(self._updates)
            return float(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(rate)))
