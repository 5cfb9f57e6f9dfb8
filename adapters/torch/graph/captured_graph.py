"""A captured graph, and the schedule of its checks against Keras."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isotrain.adapters.torch.graph.trace import TracedGraph

_CHECK_FACTOR = 16
"""The next check comes after this many times as many uses."""
_MAX_CHECK_INTERVAL = 4096
"""Uses after which the next check comes at the latest."""


@dataclass
class PeriodicallyChecked:
    """Schedule of checks with exponential backoff: at uses 1, 16, 256, 4096, then every 4096.

    Attributes:
        uses: Number of uses so far.
        next_check: Use at which the next check is due.
        last_check: Use of the last passed check; 0 before the first.
    """

    uses: int = 0
    next_check: int = 1
    last_check: int = 0

    def pass_checks(self) -> None:
        """Marks all checks that were due until now as passed."""
        while self.next_check <= self.uses:
            self.last_check = self.next_check
            self.next_check += min((_CHECK_FACTOR - 1) * self.next_check, _MAX_CHECK_INTERVAL)


class CapturedGraph(PeriodicallyChecked):
    """Captured graph of one signature, and whether its results equal Keras' to the bit."""

    def __init__(self, traced_graph: TracedGraph, is_exact: bool) -> None:
        super().__init__()
        self.traced_graph = traced_graph
        self.is_exact = is_exact

    def with_uses(self, difference: str) -> str:
        """A difference from Keras, with the uses of the graph between which it has appeared."""
        if not self.last_check:
            return difference
        return (
            f"{difference}, seen at use {self.uses} of the captured graph; at use {self.last_check} they"
            " agreed, and steps in between may differ from Keras'. The model probably reads something that"
            " is no attribute of a layer, or that changes unnoticed. Set `capture: false` in the spec to"
            " have Keras compute every step"
        )
