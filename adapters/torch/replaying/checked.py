"""At which of its uses something is checked: at the first, and ever more seldom afterwards."""

from __future__ import annotations

from dataclasses import dataclass

_AGAIN = 16
"""It is checked again after this many times as many uses."""
_AFTER = 4096
"""Uses after which it is checked again in any case."""


@dataclass
class PeriodicallyChecked:
    """What is used again and again, and checked now and then.

    Attributes:
        uses: How often it was used.
        next_check: The use at which it is checked next.
        agreed: The use at which it was checked last; 0 before the first.
    """

    uses: int = 0
    next_check: int = 1
    agreed: int = 0

    def pass_checks(self) -> None:
        """Lets those lie behind it that belong to its uses so far."""
        while self.next_check <= self.uses:
            self.agreed = self.next_check
            self.next_check += min((_AGAIN - 1) * self.next_check, _AFTER)
