"""How a framework's own optimizers call and keep the slots of the spec's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class OptimizerStateNames(ABC):
    """Names in the state of native models, which lack the prefix `optimizer/`; imports no framework.

    A slot has its name in the spec (`optimizer.slots`), where `momentum` of SGD and RMSprop is what was
    subtracted from a weight the last time, that of SGD with the other sign: the rate is in it.
    """

    @abstractmethod
    def slot(self, optimizer: str, weight: str, slot: str) -> Sequence[str]:
        """Says what a weight's slot may be called, the likeliest first; nothing where there is none.

        Args:
            optimizer: Its name in the spec.
            weight: Its name in the state.
            slot: Its name in the spec.
        """

    @abstractmethod
    def steps(self, optimizer: str, weight: str) -> str | None:
        """The name of the number of updates of a weight, if it counts."""

    def rate_factor(self, optimizer: str, slot: str) -> float | None:
        """What a slot, times the rate, is to be multiplied by to be the spec's; None: it is the spec's."""
        return None
