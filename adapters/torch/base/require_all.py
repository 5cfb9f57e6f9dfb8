"""Checks of values in a step, which also hold in captured graphs and on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from isotrain.adapters.common import class_targets
from isotrain.adapters.torch.base import private_api


def require_all(is_valid: Tensor, values: Tensor, expectation: str) -> None:
    """Fails unless all values are valid.

    A captured or compiled graph, and a GPU, which must not wait, assert it without the value.

    Args:
        is_valid: Whether each value is valid, bool, any shape.
        values: The values, same shape.
        expectation: Error message, to which the first invalid value is added.

    Raises:
        SpecError: A value is invalid.
    """
    all_valid = is_valid.all()
    if is_valid.device.type != "cpu" or private_api.is_tracing() or torch.compiler.is_compiling():
        private_api.assert_async(all_valid, expectation)
    elif not all_valid:
        raise class_targets.received(expectation, values[~is_valid][0].item())
