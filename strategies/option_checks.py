"""Checks of strategies' options: what was expected, and what was given."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from isotrain.plugin import CustomOptimizer, PlanError, TrainingSpec, UnsupportedError, unknown_name


def refused(strategy: str, option: str, expected: str, given: Any) -> PlanError:
    """The error for a wrong option."""
    return PlanError(f"strategy {strategy}: {option}: expected {expected}, got {given!r}.")


def whole(strategy: str, option: str, value: Any, least: int) -> int:
    """A whole number of at least `least`.

    Raises:
        PlanError: It is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise refused(strategy, option, f"a whole number of at least {least}", value)
    return value


def fraction(strategy: str, option: str, value: Any) -> float:
    """A number above 0, up to 1.

    Raises:
        PlanError: It is none.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise refused(strategy, option, "a number above 0 and up to 1", value)
    return float(value)


def positive(strategy: str, option: str, value: Any) -> float:
    """A number above 0.

    Raises:
        PlanError: It is none.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise refused(strategy, option, "a number above 0", value)
    return float(value)


def switch(strategy: str, option: str, value: Any) -> bool:
    """True or false.

    Raises:
        PlanError: It is neither.
    """
    if not isinstance(value, bool):
        raise refused(strategy, option, "true or false", value)
    return value


def one_of(strategy: str, option: str, value: Any, names: Collection[str]) -> str:
    """One of some names.

    Raises:
        PlanError: It is none of them.
    """
    if value not in names:
        raise PlanError(f"strategy {strategy}: " + unknown_name(option, str(value), names))
    return str(value)


def without_loss_scaling(strategy: str, spec: TrainingSpec, why: str) -> None:
    """Refuses the precision that needs it.

    Raises:
        UnsupportedError: The spec's precision is float16.
    """
    if spec.precision == "float16":
        raise UnsupportedError(
            f"strategy {strategy} {why}. Float16 needs one: use precision bfloat16 or float32, or"
            " strategy data-parallel."
        )


def without_own_optimizer(strategy: str, spec: TrainingSpec) -> None:
    """Refuses an optimizer of the person's own where each process updates a part of the weights.

    It may clip by the norm of all gradients, look across weights, or treat some by their place among all:
    of a part it would make something else, and nothing tells.

    Raises:
        UnsupportedError: The spec has one.
    """
    if isinstance(spec.optimizer, CustomOptimizer):
        raise UnsupportedError(
            f"strategy {strategy}: optimizer.custom: each process updates a part of the weights, of which an"
            " optimizer of your own might make something else. Use one of the named ones (and `clip`), or"
            " strategy data-parallel."
        )
