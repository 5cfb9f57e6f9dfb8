"""Calls of a person's code that nobody takes gradients of, unless that code does so itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isotrain.plugin import map_tree

_NEEDED = "does not require grad"
"""In what torch says where somebody differentiates, and gradients are off."""


class WithoutGradients:
    """Calls functions under `no_grad`; from the first that differentiates on, with gradients.

    A penalty on gradients, forces and differential equations need them in evaluation too. The call that shows
    it is made a second time, and draws the same random numbers.
    """

    def __init__(self) -> None:
        self._are_needed = False

    def __call__(self, compute: Callable[..., Any], *given: Any) -> Any:
        """What `compute(*given)` gives; it keeps nothing that would be needed to differentiate it."""
        if not self._are_needed:
            drawn = _random_states()
            try:
                with torch.no_grad():
                    return compute(*given)
            except RuntimeError as error:
                if _NEEDED not in str(error):
                    raise
            self._are_needed = True
            _set_random_states(drawn)
        with torch.enable_grad():
            return map_tree(_detached, compute(*given), lists=True)


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value


def _random_states() -> list[torch.Tensor]:
    """Those of torch's own generators: the processor's, and the current GPU's where one is in use."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu]


def _set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
