"""Optimizer step of a native model: `optimizer.step`, or for SGD the same arithmetic by foreach kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.base import private_api
from isotrain.plugin import CustomOptimizer, TrainingSpec

Update = Callable[[], object]


def native_update(spec: TrainingSpec, optimizer: torch.optim.Optimizer) -> Update:
    """Function that updates the weights as `optimizer.step`, of the spec's optimizer, does, to the bit."""
    optimizer_spec = spec.optimizer
    is_sgd = not isinstance(optimizer_spec, CustomOptimizer) and optimizer_spec.name == "sgd"
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    are_plain = all(type(w) is nn.Parameter and w.device.type == "cpu" for w in weights)
    return SgdUpdate(optimizer) if is_sgd and are_plain else optimizer.step


class SgdUpdate:
    """Update of torch's SGD by the same kernels, called once for each group (the foreach kernels of torch).

    It takes less than half of the time of `step` if weights are small. It calls `step` in the first update,
    which creates the momentum buffers, if hooks or a profiler watch the step, and if a weight has no gradient
    or a sparse one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Wraps SGD on dense weights of any shape, on a CPU; the options of its groups are numbers."""
        self._optimizer = optimizer

    def __call__(self) -> None:
        """Updates all weights in place; the gradients stay as they are."""
        optimizer = self._optimizer
        operands = None if private_api.has_listeners(optimizer) else self._operands()
        if operands is None:
            optimizer.step()
            return
        with torch.no_grad():
            for group, (gradients, buffers) in zip(
                self._optimizer.param_groups, operands, strict=True
            ):
                self._update(group, gradients, buffers)

    def _operands(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None:
        """Gradients and momentum buffers of each group, in the weights' shapes; None if one is missing."""
        operands = []
        for group in self._optimizer.param_groups:
            gradients = self._gradients(group["params"])
            buffers = (
                self._momentum_buffers(group["params"]) if gradients and group["momentum"] else []
            )
            if gradients is None or buffers is None:
                return None
            operands.append((gradients, buffers))
        return operands

    def _gradients(self, weights: list[nn.Parameter]) -> list[torch.Tensor] | None:
        """Gradients of weights, in their shapes; None if one is missing or sparse."""
        gradients = []
        for weight in weights:
            gradient = weight.grad
            if gradient is None or gradient.is_sparse:
                return None
            gradients.append(gradient)
        return gradients

    def _momentum_buffers(self, weights: list[nn.Parameter]) -> list[torch.Tensor] | None:
        """Momentum buffers, in the weights' shapes; None if the optimizer has not created all of them."""
        state = self._optimizer.state
        try:
            return [state[weight]["momentum_buffer"] for weight in weights]
        except KeyError:
            return None

    def _update(
        self, group: dict[str, Any], gradients: list[torch.Tensor], buffers: list[torch.Tensor]
    ) -> None:
        """Updates a group by gradients and momentum buffers of its weights' shapes, in SGD's order."""
        weights, directions, momentum = group["params"], gradients, group["momentum"]
        if decay := group["weight_decay"]:
            directions = private_api.foreach_add(directions, weights, alpha=decay)
        if buffers:
            private_api.foreach_mul_(buffers, momentum)
            private_api.foreach_add_(buffers, directions, alpha=1 - group["dampening"])
            if group["nesterov"]:
                directions = private_api.foreach_add(directions, buffers, alpha=momentum)
            else:
                directions = buffers
        private_api.foreach_add_(weights, directions, alpha=-group["lr"])
