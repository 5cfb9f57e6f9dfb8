"""Calls of user code under `torch.no_grad`, unless that code needs gradients itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isotrain.adapters.torch.base import gpu
from isotrain.plugin import map_tree

_GRADIENTS_NEEDED_ERROR = "does not require grad"
"""Part of torch's error for a gradient of something that was computed under `no_grad`."""


class WithoutGradients:
    """Calls functions under `no_grad`; with gradients once a call has computed gradients itself.

    Gradient penalties, forces and differential equations need gradients in evaluation too. The call that
    fails is repeated with the same random numbers and state.
    """

    def __init__(self, state: Callable[[], Sequence[torch.Tensor]] = tuple) -> None:
        """Assumes that no gradients are needed.

        Args:
            state: Function that returns the tensors that a call changes in place.
        """
        self._state = state
        self._needs_gradients = False

    def __call__(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Result of `compute(*args)`, a pytree whose tensors are detached."""
        if not self._needs_gradients:
            before = [(tensor, tensor.clone()) for tensor in self._state()]
            rng_states = {device: gpu.rng_state(device) for device in (gpu.CPU, *gpu.in_use())}
            try:
                with torch.no_grad():
                    return compute(*args)
            except RuntimeError as error:
                if _GRADIENTS_NEEDED_ERROR not in str(error):
                    raise
            self._needs_gradients = True
            for tensor, value in before:
                tensor.copy_(value)
            for device, state in rng_states.items():
                gpu.set_rng_state(state, device)
        with torch.enable_grad():
            return map_tree(_detached, compute(*args), lists=True)


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value
