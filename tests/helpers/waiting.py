"""Waiting for other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from isotrain.core.system.deadline import Deadline

T = TypeVar("T")
_LOOK_SECONDS = 0.05


def wait_until(
    condition: Callable[[], T], seconds: float, what: str = "it did not happen in time"
) -> T:
    """Returns the first true value of a condition; fails after `seconds`."""
    patience = Deadline(seconds)
    while not (found := condition()):
        assert not patience.is_over, what
        time.sleep(_LOOK_SECONDS)
    return found
