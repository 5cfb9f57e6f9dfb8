"""The loss of a step whose slices may still be under way."""

from __future__ import annotations

from collections.abc import Callable


class PendingLoss:
    """The mean loss of a global batch; each slice at the weights with which it was computed."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """Makes one that is not known yet.

        Args:
            wait: Returns once `value` is set.
        """
        self._wait = wait
        self.value: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `float` gives it at once."""
        return self.value is not None

    def __float__(self) -> float:
        if self.value is None:
            self._wait()
        assert self.value is not None
        return self.value
