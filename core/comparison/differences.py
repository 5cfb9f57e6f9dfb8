"""How far two losses are apart; imports nothing heavy."""

from __future__ import annotations

import math


def difference(one: float, two: float) -> float:
    """Of two losses, relative to the larger of them; infinite where just one is no number."""
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.inf
    return abs(two - one) / max(abs(one), abs(two))
