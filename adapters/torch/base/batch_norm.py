"""Batch normalization of torch modules over the global batch, or over ghost batches."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from isotrain.adapters.common.step_context import CommonStepContext
from isotrain.adapters.torch.base import private_api
from isotrain.plugin import SpecError


class BatchNorm(private_api.BatchNormBase):
    """A `SyncBatchNorm` that sums over no replicas: DistributedDataParallel refuses those on CPUs."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected inputs [batch, features, ...], got {input.dim()} axes")


def normalize_globally(model: nn.Module, step: CommonStepContext) -> None:
    """Lets batch normalizations compute their statistics from the samples of all replicas.

    Args:
        model: Model with any modules; those that are no batch normalization stay as they are.
        step: Step context of the replica, whose differentiable sums are used.
    """
    for module in model.modules():
        if private_api.is_batch_norm(module):
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = BatchNorm
            module.forward = _GlobalBatchNorm(module, step)


def normalize_ghost_batches(model: nn.Module, step: CommonStepContext) -> None:
    """Lets batch normalizations compute statistics of each ghost batch: Hoffer et al. (2017), section 3.

    Args:
        model: Model with any modules; those that are no batch normalization stay as they are.
        step: Step context of the replica, which knows its ghost batches.

    Raises:
        SpecError: A batch normalization has no running statistics, with which it would be evaluated, or sums
            its statistics over the replicas itself.
    """
    for name, module in model.named_modules():
        if private_api.is_batch_norm(module):
            if isinstance(module, nn.SyncBatchNorm):
                raise SpecError(
                    f"batch_norm: ghost: {name or 'the model'} is a SyncBatchNorm, which sums over the"
                    " replicas. Use nn.BatchNorm1d, 2d or 3d, or batch_norm: global."
                )
            if module.running_mean is None:
                raise SpecError(
                    f"batch_norm: ghost: {name or 'the model'} has track_running_stats=False, so that its"
                    " predictions depend on their batch. Use batch_norm: global."
                )
            module.forward = _GhostBatchNorm(module, step)


def is_local(module: nn.Module) -> bool:
    """Whether a batch normalization computes its statistics from the samples of its replica."""
    return not isinstance(module.forward, _EqualBatchNorm)


class _EqualBatchNorm:
    """Forward pass of a batch normalization that does not depend on the number of replicas."""

    def __init__(self, module: Any, step: CommonStepContext) -> None:
        self._module = module
        self._local_forward = module.forward
        self._step = step

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalized inputs, shape [batch, features, ...] and dtype as given."""
        module = self._module
        is_evaluated = not module.training and module.running_mean is not None
        if is_evaluated or self._step.is_alone:
            return self._local_forward(inputs)
        private_api.check_dimensions(module, inputs)
        return self._normalized(inputs)

    @abstractmethod
    def _normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalized inputs of a training step, as `__call__`."""

    def _next_factor(self) -> float:
        """Counts a batch; returns the weight of its statistics in the running ones."""
        module = self._module
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return 1.0 / float(module.num_batches_tracked)
        return float(module.momentum)


class _GlobalBatchNorm(_EqualBatchNorm):
    """Batch normalization over the samples of all replicas; see Ioffe and Szegedy (2015), algorithm 1.

    The variance is the mean squared distance from the global mean, which takes a second sum over the replicas
    and loses no digits to cancellation. Moving statistics are updated as torch updates them.
    """

    def _normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        """Collective."""
        module = self._module
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
        module, factor = self._module, self._next_factor()
        module.running_mean.lerp_(mean.to(module.running_mean), factor)
        module.running_var.lerp_(variance.to(module.running_var), factor)


class _GhostBatchNorm(_EqualBatchNorm):
    """Batch normalization over each ghost batch of this replica.

    The running statistics move towards the mean of those of the ghost batches, weighted by their samples. So
    their mean over the replicas, by samples, is the same for any number of these.
    """

    def _normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        """Local."""
        module = self._module
        running = [module.running_mean, module.running_var]
        factor = self._next_factor()
        results, moved = [], [torch.zeros_like(each) for each in running]
        for rows in self._step.ghost_batches(len(inputs)):
            statistics = [each.clone() for each in running]
            ghost = inputs[rows]
            mean, variance = statistics
            affine = module.weight, module.bias
            results.append(
                functional.batch_norm(ghost, mean, variance, *affine, True, factor, module.eps)
            )
            for total, each in zip(moved, statistics, strict=True):
                total.add_(each, alpha=len(ghost) / len(inputs))
        for buffer, total in zip(running, moved, strict=True):
            buffer.copy_(total)
        return torch.cat(results)
