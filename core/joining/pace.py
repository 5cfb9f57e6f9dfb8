"""How often the processes of a joined run tell each other where they are."""

from __future__ import annotations

from dataclasses import dataclass

from isotrain.core.contracts.reporter import HEARTBEAT_SECONDS

_SECONDS_PER_PROCESS = 0.002
"""Rank 0 hears of all of them, and has work of its own to do."""
_WITHIN_SILENCE = 4


@dataclass(frozen=True)
class HeartbeatInterval:
    """How often, in seconds.

    Attributes:
        min_seconds: Between two messages at least, where something has changed.
        max_seconds: Between two at most: each is a sign of life.
    """

    min_seconds: float
    max_seconds: float

    @classmethod
    def of(cls, processes: int, silence: float) -> HeartbeatInterval:
        """For a run.

        Args:
            processes: Of it.
            silence: Seconds without a sign of life after which one is taken for lost.
        """
        most = silence / _WITHIN_SILENCE
        news = min(_SECONDS_PER_PROCESS * processes, most)
        return cls(news, min(max(HEARTBEAT_SECONDS, news), most))
