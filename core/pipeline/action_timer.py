"""Times of the calls that a step is made of, for backends whose steps are one call."""

from __future__ import annotations

import functools
import time
from typing import Any

from isotrain.core.pipeline.executor import ExecutedAction

EXPOSED_EXCHANGE = "exposed exchange"
"""Action that waits for collectives while nothing is computed."""


class ActionTimer:
    """Times calls of one process; each action begins where the one before ended. Local.

    Attributes:
        enabled: Whether steps are timed.
        executed: Actions of the last timed step.
    """

    def __init__(self, group: Any) -> None:
        """Starts anew with every `synchronous_step` of a replica group."""
        self.enabled = True
        self.executed: list[ExecutedAction] = []
        self._step: list[ExecutedAction] | None = None  # none outside of a timed step
        self._end = 0.0
        step = group.synchronous_step

        def timed_step(*arguments: Any) -> Any:
            if not self.enabled:
                return step(*arguments)
            self._step, self._end = [], time.perf_counter()
            try:
                result = step(*arguments)
                self.executed = self._step
            finally:
                self._step = None
            return result

        group.synchronous_step = timed_step

    def time_calls(self, owner: Any, method: str, action: str) -> None:
        """Ends an action of that name with every later call of a method of `owner`."""
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            self.end(action)
            return result

        setattr(owner, method, timed)

    def end(self, action: str) -> None:
        """Ends an action of a timed step; it goes on with the one before if that has the same name."""
        if self._step is None:
            return
        begin, self._end = self._end, time.perf_counter()
        if self._step and self._step[-1].name == action:
            begin = self._step.pop().begin
        self._step.append(ExecutedAction(action, begin, self._end))

    def move_end(self, end: float) -> None:
        """Makes the last action end at an earlier time by `time.perf_counter`, if it had begun by then."""
        if not self._step:
            return
        last = self._step.pop()
        self._end = end if last.begin < end < last.end else last.end
        self._step.append(ExecutedAction(last.name, last.begin, self._end))
