"""Metrics whose sums round otherwise by a record than by Keras: each is added to twice for a slice."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class TwiceAdded(keras.metrics.Metric):  # type: ignore[misc]
    """Sums of predictions times many numbers, of the positive ones and of the others after each other."""

    def __init__(self, name: str = "twice_added", late: bool = False) -> None:
        super().__init__(name=name)
        self._built = False
        if not late:
            self._build()

    def _build(self) -> None:
        self.total = self.add_variable((64,), "zeros", name="total")
        self._built = True

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if not self._built:
            self._build()
        positive = ops.cast(y_pred > 0.0, y_pred.dtype)
        for part in (positive, positive - 1.0):
            self.total.assign_add(ops.sum(y_pred * part) * ops.arange(1, 65, dtype=y_pred.dtype))

    def result(self) -> Any:
        return self.total.value


class Counting(TwiceAdded):
    """Keeps a plain number of the epochs that it has seen."""

    def __init__(self, name: str = "counting") -> None:
        self.epochs = 0
        super().__init__(name)

    def reset_state(self) -> None:
        super().reset_state()
        self.epochs += 1
