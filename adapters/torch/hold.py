"""Copies that are made while steps go on, and what waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Hold:
    """Holds up whoever would change what is being copied."""

    def __init__(self) -> None:
        self._copies = 0
        self._changed = threading.Condition()

    def until(self, copy: Callable[[], T]) -> Callable[[], T]:
        """From now on until what it gives, which does the copying, was called and has returned."""
        with self._changed:
            self._copies += 1

        def released() -> T:
            try:
                return copy()
            finally:
                with self._changed:
                    self._copies -= 1
                    self._changed.notify_all()

        return released

    def wait(self) -> None:
        """Returns once nothing is being copied."""
        if self._copies:
            with self._changed:
                self._changed.wait_for(lambda: not self._copies)
