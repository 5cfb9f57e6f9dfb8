"""Averages the loss in DDP's gradient all-reduce instead of in a collective of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.trainer.base import LossModule


class LossInGradients(nn.Module):
    """A loss module with one more parameter, whose gradient is the loss.

    DDP's all-reduce of gradients thereby averages the loss too. The parameter stays 0, so neither the loss
    nor its other gradients change. Its gradient is the last one to become ready.
    """

    loss_module: LossModule

    def __init__(
        self,
        loss_module: LossModule,
        device: torch.device,
        dtype: torch.dtype,
        length: int,
        *,
        at_end: bool,
    ) -> None:
        """Wraps a loss module.

        Args:
            loss_module: Module that returns loss and predictions.
            device: Device of the added parameter.
            dtype: Dtype of the added parameter; the weights' dtype puts it into one bucket with them.
            length: Length of the added parameter, a vector: 1 for the mean loss; 2 where padding may be left
                out, for the fraction of padding among the targets too.
            at_end: Whether the added parameter is the last one in `parameters()` (else the first).
        """
        super().__init__()
        # of one dimension: torch's PowerSGD takes no parameters without any
        carrier = nn.Parameter(torch.zeros(length, device=device, dtype=dtype))
        # a child module: a module's own parameters come before those of its children
        modules = {"loss_module": loss_module, "carrying": nn.ParameterList([carrier])}
        for name, module in modules.items() if at_end else reversed(modules.items()):
            self.add_module(name, module)
        self._carrier = (carrier,)  # in a tuple, torch finds it once
        self._carries_padding = length > 1  # a view of one number is cheaper than unbind

    def forward(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Returns loss and predictions of the loss module; the loss is a scalar or `[mean, padding]`."""
        (carrier,) = self._carrier
        # first: gradients come in the reverse order
        for_mean, *for_padding = carrier.unbind() if self._carries_padding else (carrier.squeeze(),)
        loss, predictions = self.loss_module.forward(inputs, targets)
        if not for_padding or not loss.dim():
            return torch.addcmul(loss, for_mean, loss.detach()), predictions
        mean, padding = loss
        carrying = mean + for_mean * mean.detach() + for_padding[0] * padding
        return torch.stack([carrying, padding]), predictions

    def pop_mean(self) -> torch.Tensor | None:
        """Takes the all-reduced loss of the last step: a scalar, or `[2]`; None without a backward pass."""
        (carrier,) = self._carrier
        mean, carrier.grad = carrier.grad, None
        return None if mean is None else mean.squeeze().clone()

    def keeps_summation_order(self, replicas: int, bucket_mib: float) -> bool:
        """Whether gradients are summed in the same order as without the added parameter.

        Gloo's ring all-reduce cuts a message into two segments per replica, and the sum of each segment
        begins on another replica. One more number at the end moves the cuts only where the segments are full.

        Args:
            replicas: Number of replicas in the all-reduce.
            bucket_mib: Size (MiB) at which DistributedDataParallel closes its first bucket. Smaller gradients
                lie in one bucket; for larger ones the last bucket's content is known only after a step.
        """
        embeddings = (nn.Embedding, nn.EmbeddingBag)
        if any(isinstance(each, embeddings) and each.sparse for each in self.loss_module.modules()):
            return False  # sparse gradients are all-reduced separately
        (carrier,) = self._carrier
        sizes = [
            weight.numel()
            for weight in self.loss_module.parameters()
            if weight.requires_grad and weight.dtype == carrier.dtype
        ]
        fits = sum(sizes) * carrier.element_size() < bucket_mib * (1 << 20)
        return fits and -sum(sizes) % (2 * replicas) >= carrier.numel()
