"""A deadline that does not count suspensions of this process or its machine."""

from __future__ import annotations

import time

_MAX_CHECK_SECONDS = 0.5
"""Maximum that counts of the time between two checks; waiting code checks more often than that."""


class Deadline:
    """A timeout that ignores suspensions: while the machine is suspended, peers make no progress either."""

    def __init__(self, seconds: float) -> None:
        """Starts the timeout."""
        self._remaining = seconds
        self._checked = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the timeout has passed. Must be read several times a second."""
        now = time.monotonic()
        self._remaining -= min(now - self._checked, _MAX_CHECK_SECONDS)
        self._checked = now
        return self._remaining <= 0
