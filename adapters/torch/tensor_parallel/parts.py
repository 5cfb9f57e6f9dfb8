"""The parts of a tensor-parallel replica on torch: differentiable collectives of layers that are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator

AllReduce = Callable[[torch.Tensor], torch.Tensor]


class _Copy(torch.autograd.Function):
    """A tensor as it is; its gradient is summed over the parts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        """Returns a tensor of any shape."""
        ctx.all_reduce = all_reduce
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sums the gradient, of the tensor's shape. Collective."""
        return _Sum.apply(gradient, ctx.all_reduce), None


class _Sum(torch.autograd.Function):
    """Sum over the parts, each of which gets the gradient of the result."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        """Sums a tensor of any shape. Collective."""
        ctx.all_reduce = all_reduce
        return all_reduce(tensor.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the gradient, of the result's shape."""
        return _Copy.apply(gradient, ctx.all_reduce), None


class TorchParts:
    """The parts of a replica, as cut layers see them.

    Attributes:
        index: Index of this process's part.
        degree: Number of parts.
        numbers_of_max: Numbers that `max` sends for each element of its tensor.
    """

    numbers_of_max = 1

    def __init__(self, communicator: PipelineCommunicator) -> None:
        """Connects to the other parts."""
        topology = communicator.topology
        self.index, self.degree = topology.process, topology.processes
        self._all_reduce = communicator.sum_in_replica
        self._max = communicator.max_in_replica

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, of any shape; its gradient is the sum of the parts'. Collective."""
        copied: torch.Tensor = _Copy.apply(tensor, self._all_reduce)
        return copied

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of the parts' tensors, of any shape; each gets the gradient of the result. Collective."""
        total: torch.Tensor = _Sum.apply(tensor, self._all_reduce)
        return total

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum of the parts' tensors, of any shape, without gradients. Collective."""
        return self._max(tensor.detach().contiguous())
