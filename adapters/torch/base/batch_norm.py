"""Batch normalization of torch modules over the global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotrain.adapters.common.step_context import CommonStepContext
from isotrain.adapters.torch.base import private_api


def normalize_globally(model: nn.Module, step: CommonStepContext) -> None:
    """Lets batch normalizations compute their statistics from the samples of all replicas.

    Args:
        model: Model with any modules; those that are no batch normalization stay as they are.
        step: Step context of the replica, whose differentiable sums are used.
    """
    for module in model.modules():
        if private_api.is_batch_norm(module):
            module.forward = _GlobalBatchNorm(module, step)


def is_global(module: nn.Module) -> bool:
    """Whether a batch normalization computes its statistics from the samples of all replicas."""
    return isinstance(module.forward, _GlobalBatchNorm)


class _GlobalBatchNorm:
    """Forward pass of a batch normalization; see Ioffe and Szegedy (2015), algorithm 1.

    The variance is the mean squared distance from the global mean, which takes a second sum over the replicas
    and loses no digits to cancellation. Moving statistics are updated as torch updates them.
    """

    def __init__(self, module: Any, step: CommonStepContext) -> None:
        self._module = module
        self._local_forward = module.forward
        self._step = step

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalized inputs, shape [batch, features, ...] and dtype as given. Collective while training."""
        module = self._module
        is_evaluated = not module.training and module.running_mean is not None
        if is_evaluated or self._step.is_alone:
            return self._local_forward(inputs)
        private_api.check_dimensions(module, inputs)
        values = inputs if inputs.dtype == torch.float64 else inputs.float()
        reduced = [axis for axis in range(values.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(values.ndim)]
        count = self._step.sum(values.new_full((1,), values.numel() // values.shape[1]))
        mean = self._step.sum(values.sum(reduced)) / count
        distances = values - mean.reshape(shape)
        variance = self._step.sum(distances.square().sum(reduced)) / count
        if module.training and module.running_mean is not None:
            self._update_moving(mean.detach(), variance.detach() * (count / (count - 1)))
        result = distances * torch.rsqrt(variance + module.eps).reshape(shape)
        if module.affine:
            result = result * module.weight.reshape(shape) + module.bias.reshape(shape)
        return result.to(inputs.dtype)

    def _update_moving(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Moves the running statistics towards those of a batch, shapes [features]."""
        module = self._module
        module.num_batches_tracked.add_(1)
        factor = (
            1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        )
        module.running_mean.lerp_(mean.to(module.running_mean), factor)
        module.running_var.lerp_(variance.to(module.running_var), factor)
