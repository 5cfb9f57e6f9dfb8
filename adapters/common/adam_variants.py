"""Coefficients of NAdam and RAdam, which follow from the number of the step; imports no framework.

NAdam: T. Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016, algorithm 2.
RAdam: L. Liu et al., "On the variance of the adaptive learning rate and beyond", arXiv 1908.03265,
algorithm 2.
"""

from __future__ import annotations

import math

PRODUCT_STEPS = 128
"""Number of first steps whose momenta are multiplied: the product is below 1e-35 then, and added to 1."""
DECAY, DECAY_RATE = 0.96, 0.004
"""NAdam's momentum rises from half of `beta_1`: `beta_1 * (1 - DECAY ** (DECAY_RATE * step) / 2)`."""
LEAST_LENGTH = 5.0
"""RAdam adapts step sizes while the approximated average has more than this many terms."""


def nadam_momentum(beta_1: float, step: int) -> float:
    """Momentum of NAdam in a step, which counts from 1."""
    return beta_1 * (1 - 0.5 * DECAY ** (DECAY_RATE * step))


def nadam_momentum_product(beta_1: float, step: int) -> float:
    """Product of NAdam's momenta of all steps up to one, which counts from 1; 1 for step 0."""
    last = min(step, PRODUCT_STEPS)
    return math.prod(nadam_momentum(beta_1, each) for each in range(1, last + 1))


def largest_length(beta_2: float) -> float:
    """Number of terms of RAdam's approximated average after infinitely many steps."""
    return 2 / (1 - beta_2) - 1


def radam_rectification(beta_2: float, step: int) -> float | None:
    """Factor of RAdam's adaptive step size in a step, from 1 on; None for a step that is not adaptive."""
    end = largest_length(beta_2)
    remaining = -math.expm1(step * math.log(beta_2)) if beta_2 else 1.0
    length = end - 2 * step * (1 - remaining) / remaining
    if length <= LEAST_LENGTH:
        return None
    return math.sqrt((length - 4) * (length - 2) * end / ((end - 4) * (end - 2) * length))
