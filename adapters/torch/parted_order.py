"""In which order replicas exchange weights that lie in parts, and gradients of these."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["reads", "gives", "ends"]


class CollectiveCall(NamedTuple):
    """What all replicas do at one time.

    Attributes:
        kind: They join a unit's weights, sum its gradients, or have come to the end of a forward pass.
        number: Of the unit; at such an end, whether a backward pass follows.
    """

    kind: Kind
    number: int


_LAST = CollectiveCall("gives", 0)
"""Units give their gradients once a step, from the last one to the first."""
_ALONE = CollectiveCall("ends", 0)
"""The end of a forward pass that is not of a step."""


class CollectiveOrder:
    """What comes next if this step goes as the last one did.

    It hangs on nothing but what all replicas have done together, so that all expect the same.
    """

    def __init__(self) -> None:
        """Expects nothing."""
        self._steps: list[CollectiveCall] = []
        self._at = 0

    @property
    def next(self) -> CollectiveCall | None:
        """What all expect to do; None where this was not seen yet."""
        return self._steps[self._at] if self._at < len(self._steps) else None

    def note(self, done: CollectiveCall) -> None:
        """Is told what all have done."""
        if done == _ALONE:
            self._at = 0
            return
        if done != self.next:
            self._steps[self._at :] = [done]
        self._at += 1
        if done == _LAST:
            del self._steps[self._at :]
            self._at = 0
