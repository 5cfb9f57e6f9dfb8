"""The update of a native model: the optimizer's own step, or its arithmetic in fewer calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.base import private_api
from isotrain.plugin import CustomOptimizer, TrainingSpec

Update = Callable[[], object]


def native_update(
    spec: TrainingSpec, optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]
) -> Update:
    """What updates weights as `optimizer.step` does, to the bit.

    Args:
        spec: Names the optimizer.
        optimizer: Made as it says.
        weights: All that it updates.
    """
    settings = spec.optimizer
    is_sgd = not isinstance(settings, CustomOptimizer) and settings.name == "sgd"
    plain = all(type(weight) is nn.Parameter and weight.device.type == "cpu" for weight in weights)
    return SgdUpdate(optimizer, weights) if is_sgd and plain else optimizer.step


class SgdUpdate:
    """Updates as torch's SGD does: by the same kernels, called for all weights at once.

    That takes less than half of the time where weights are small. `step` itself makes the momenta, in the
    first update, and is called where it does more: where somebody listens to it, and where weights have no
    gradients or sparse ones.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> None:
        """Looks at nothing yet.

        Args:
            optimizer: With one group, whose options are numbers.
            weights: All that it updates, on a CPU.
        """
        self._optimizer = optimizer
        self._weights = list(weights)

    def __call__(self) -> None:
        """Updates every weight; the gradients stay as they are."""
        optimizer = self._optimizer
        options = optimizer.param_groups[0]
        gradients = None if private_api.has_listeners(optimizer) else self._gradients()
        momenta = self._momenta() if gradients and options["momentum"] else []
        if gradients is None or momenta is None:
            optimizer.step()
            return
        with torch.no_grad():
            self._update(options, gradients, momenta)

    def _gradients(self) -> list[torch.Tensor] | None:
        """Of every weight; None where one has none, or a sparse one."""
        found = []
        for weight in self._weights:
            gradient = weight.grad
            if gradient is None or gradient.is_sparse:
                return None
            found.append(gradient)
        return found

    def _momenta(self) -> list[torch.Tensor] | None:
        """Those that the optimizer keeps now; None where it has yet to make some."""
        state = self._optimizer.state
        try:
            return [state[weight]["momentum_buffer"] for weight in self._weights]
        except KeyError:
            return None

    def _update(
        self, options: dict[str, Any], gradients: list[torch.Tensor], momenta: list[torch.Tensor]
    ) -> None:
        weights, directions, momentum = self._weights, gradients, options["momentum"]
        if decay := options["weight_decay"]:
            directions = private_api.foreach_add(directions, weights, alpha=decay)
        if momenta:
            private_api.foreach_mul_(momenta, momentum)
            private_api.foreach_add_(momenta, directions, alpha=1 - options["dampening"])
            if options["nesterov"]:
                directions = private_api.foreach_add(directions, momenta, alpha=momentum)
            else:
                directions = momenta
        private_api.foreach_add_(weights, directions, alpha=-options["lr"])
