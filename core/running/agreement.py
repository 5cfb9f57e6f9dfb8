"""How all processes come to know, at the same step, what only some of them were told."""

from __future__ import annotations

import secrets
import time

import numpy as np

from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.reporter import Wishes

_SECONDS = 1.0
"""About so often they agree; it costs a collective of a few numbers."""
_MOST_STEPS = 1 << 20


class Agreement:
    """Gathers wishes at steps that every process knows, about once a second."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._copies = len(group.local_replicas)
        self._is_alone = self._copies == group.replicas
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
        save, end, slowest = self._largest([float(own.save), float(own.end), pace])
        self._meet_at(step, step + int(min(max(1.0, _SECONDS / max(slowest, 1e-9)), _MOST_STEPS)))
        return Wishes(save > 0, end > 0)

    def holds_anywhere(self, here: bool) -> bool:
        """Whether something is so on any process."""
        return here if self._is_alone else self._largest([float(here)])[0] > 0

    def token(self) -> str:
        """A name that all processes have in common, and no other run has."""
        number = secrets.randbits(52)  # as many as a float64 keeps
        return f"{number if self._is_alone else int(self._largest([float(number)])[0]):013x}"

    def _meet_at(self, step: int, following: int) -> None:
        self._last = step, time.monotonic()
        self._next = following

    def _largest(self, numbers: list[float]) -> list[float]:
        tensor = self._group.tensor(np.array(numbers, np.float64))
        reduced = self._group.all_reduce([tensor] * self._copies, "max")
        return [float(number) for number in self._group.numpy(reduced[0])]
