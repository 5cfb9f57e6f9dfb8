"""Checks of strategy options and spec fields, with errors that name the expected value."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from isotrain.plugin import CustomOptimizer, PlanError, TrainingSpec, UnsupportedError, unknown_name


def option_error(strategy: str, option: str, expected: str, value: Any) -> PlanError:
    """The error for a bad value of an option."""
    return PlanError(f"strategy {strategy}: {option}: expected {expected}, received {value!r}.")


def whole_number(strategy: str, option: str, value: Any, minimum: int) -> int:
    """A whole number of at least `minimum`.

    Raises:
        PlanError: The value is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise option_error(strategy, option, f"a whole number of at least {minimum}", value)
    return value


def fraction(strategy: str, option: str, value: Any) -> float:
    """A number above 0 and up to 1.

    Raises:
        PlanError: The value is something else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise option_error(strategy, option, "a number above 0 and up to 1", value)
    return float(value)


def fraction_or_zero(strategy: str, option: str, value: Any) -> float:
    """A number from 0 to 1.

    Raises:
        PlanError: The value is something else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise option_error(strategy, option, "a number from 0 to 1", value)
    return float(value)


def positive(strategy: str, option: str, value: Any) -> float:
    """A finite number above 0.

    Raises:
        PlanError: The value is something else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise option_error(strategy, option, "a number above 0", value)
    return float(value)


def boolean(strategy: str, option: str, value: Any) -> bool:
    """True or false.

    Raises:
        PlanError: The value is something else.
    """
    if not isinstance(value, bool):
        raise option_error(strategy, option, "true or false", value)
    return value


def one_of(strategy: str, option: str, value: Any, names: Collection[str]) -> str:
    """One of the names.

    Raises:
        PlanError: The value is something else.
    """
    if value not in names:
        raise PlanError(f"strategy {strategy}: " + unknown_name(option, str(value), names))
    return str(value)


def names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Names as a tuple; a single one may be given without brackets on the command line."""
    return (value,) if isinstance(value, str) else tuple(value)


def refuse_float16(strategy: str, spec: TrainingSpec, why: str) -> None:
    """Refuses precision float16, which needs loss scaling.

    Raises:
        UnsupportedError: The spec's precision is float16.
    """
    if spec.precision == "float16":
        raise UnsupportedError(
            f"strategy {strategy} {why}. Float16 needs one: use precision bfloat16 or float32, or"
            " strategy data-parallel."
        )


def refuse_custom_optimizer(strategy: str, spec: TrainingSpec) -> None:
    """Refuses a custom optimizer where each process updates only its shard of the weights.

    It may clip by the norm of all gradients, look across weights, or treat some by their index among all:
    on a shard it would silently compute something else.

    Raises:
        UnsupportedError: The spec has a custom optimizer.
    """
    if isinstance(spec.optimizer, CustomOptimizer):
        raise UnsupportedError(
            f"strategy {strategy}: optimizer.custom: each process updates only its shard of the weights, on"
            " which an optimizer of your own might compute something else. Use one of the named optimizers"
            " (and `clip`), or strategy data-parallel."
        )
