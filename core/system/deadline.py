"""Waiting for others: how long is left, of which no pause of this process or its machine takes much."""

from __future__ import annotations

import time

_MOST_SECONDS = 0.5
"""Of the time between two looks, which whoever waits takes more often than that."""


class Deadline:
    """Seconds that are left to wait; while the machine stood still, nobody did what is waited for."""

    def __init__(self, seconds: float) -> None:
        """Begins to wait."""
        self._left = seconds
        self._looked = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left. To be asked several times a second."""
        now = time.monotonic()
        self._left -= min(now - self._looked, _MOST_SECONDS)
        self._looked = now
        return self._left <= 0
