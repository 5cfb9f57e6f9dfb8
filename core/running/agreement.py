"""How all processes come to know, at the same step, what only some of them were told."""

from __future__ import annotations

import secrets
import time

from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.reporter import Wishes
from isotrain.core.data.batch import Batch
from isotrain.core.errors import DataError

_SECONDS = 1.0
"""About so often they agree; it costs a collective of a few numbers."""
_MOST_STEPS = 1 << 20


def require_same_samples(group: ReplicaGroup, batch: Batch) -> None:
    """Sees, where a stream says what it gave, that it gave the same to every process.

    Raises:
        DataError: It did not.
    """
    if batch.fingerprint is None or group.is_alone:
        return
    high, low = group.largest([batch.fingerprint, -batch.fingerprint])
    if high != -low:
        raise DataError(
            f"epoch {batch.epoch}: the processes do not see the same samples. A stream must give every"
            " process the same batches in the same order: give its shuffling a fixed seed, and let"
            " it take no shard of its own."
        )


class Agreement:
    """Gathers wishes at steps that every process knows, about once a second."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._is_alone = group.is_alone
        self._next: int | None = None
        self._last = (0, 0.0)

    def reach(self, step: int, own: Wishes) -> Wishes:
        """Gives what any process wishes, the same on all of them; nothing before the next meeting.

        Every process calls it after the same steps.

        Args:
            step: Steps done.
            own: What this process wishes.
        """
        if self._is_alone:
            return own
        if self._next is None:  # the first steps, in which frameworks set up, tell no pace
            self._meet_at(step, step + 1)
        if self._next is not None and step < self._next:
            return Wishes()
        steps, seconds = step - self._last[0], time.monotonic() - self._last[1]
        pace = seconds / steps if steps > 0 else _SECONDS
        save, end, slowest = self._group.largest([float(own.save), float(own.end), pace])
        self._meet_at(step, step + int(min(max(1.0, _SECONDS / max(slowest, 1e-9)), _MOST_STEPS)))
        return Wishes(save > 0, end > 0)

    def holds_anywhere(self, here: bool) -> bool:
        """Whether something is so on any process."""
        return self.highest(here) > 0

    def highest(self, here: float) -> float:
        """The highest of a number's values on all processes."""
        return here if self._is_alone else self._group.largest([float(here)])[0]

    def token(self) -> str:
        """A name that all processes have in common, and no other run has."""
        number = secrets.randbits(52)  # as many as a float64 keeps
        chosen = number if self._is_alone else int(self._group.largest([float(number)])[0])
        return f"{chosen:013x}"

    def _meet_at(self, step: int, following: int) -> None:
        self._last = step, time.monotonic()
        self._next = following
