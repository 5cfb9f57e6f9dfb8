"""Targets that are classes: the error for one that the predictions do not have, on all frameworks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from isotrain.plugin import SpecError

RequireAll = Callable[[Any, Any, str], None]
"""`require_all(is_valid, values, expectation)`: fails with the expectation and the first invalid value.

Two tensors of one shape, the first boolean. It also works in a captured graph and in a `tf.function`.
"""
_KERNEL_ERROR = re.compile(r"Target (-?\d+) is out of bounds|Received a label value of (-?\d+) ")
"""Errors of the cross-entropies of torch and of TensorFlow for a class that the predictions do not have."""
_SCOPE = re.compile(r"\b(loss|metrics)\.([\w-]+)\.(?:_\d+)?/")


def expectation(field: str, name: str, classes: Any) -> str:
    """The error for a target that is no class, without the target itself.

    Args:
        field: Spec field, `loss` or `metrics`.
        name: Name of the loss or metric.
        classes: Number of classes of the predictions; None if it is not known.
    """
    expected = "one of the predictions' classes" if classes is None else f"0 to {classes - 1}"
    return (
        f"{field}: {name!r} got a target that is no class; expected {expected}. Change the data or the"
        " outputs of the model; a loss with the option `ignore_class` leaves out targets of that class."
    )


def received(expected: str, value: Any) -> SpecError:
    """The error for an invalid value."""
    return SpecError(f"{expected} Received {value}.")


def invalid_class(error: Exception) -> str | None:
    """The target that a framework's cross-entropy has refused, from its error; None for other errors."""
    found = _KERNEL_ERROR.search(str(error))
    return None if found is None else found[1] or found[2]


def scope(field: str, name: str) -> str:
    """Name scope for the operations of a loss or metric: `in_scope` reads it from an error of a graph."""
    return f"{field}.{re.sub(r'[^A-Za-z0-9_-]', '_', name)}."


def in_scope(message: str) -> tuple[str, str] | None:
    """Spec field and name of the loss or metric whose operation has failed; None outside of all scopes."""
    found = _SCOPE.search(message)
    return None if found is None else (found[1], found[2])


def ctc_labels(classes: Any, blank: int = 0) -> str:
    """Expectation of the labels of a CTC loss: classes other than the blank."""
    expected = "classes of the predictions" if classes is None else f"0 to {classes - 1}"
    return (
        f"loss: 'ctc' got a label that is no class; expected {expected}, other than the blank, {blank},"
        " which may only fill the end of the labels. Change the data or the outputs of the model."
    )


CTC_TARGET_LENGTHS = (
    "loss: 'ctc' got a length of labels that is negative, or larger than the axis of the labels."
)
CTC_STEPS = (
    "loss: 'ctc' got a number of steps that is negative, or larger than the predictions have."
)
CTC_FIT = (
    "loss: 'ctc' got more labels than the steps of the predictions can spell: each label takes a step, and"
    " two equal labels in a row another one between them. Leave out the sample, or let the model return more"
    " steps. Expected a number of steps that this many fit into:"
)
