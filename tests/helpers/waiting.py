"""Waiting for what happens elsewhere: in another process, or on another thread."""

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
    """What a condition gives, once that is something; it is a failure when it takes longer."""
    patience = Deadline(seconds)
    while not (found := condition()):
        assert not patience.is_over, what
        time.sleep(_LOOK_SECONDS)
    return found
