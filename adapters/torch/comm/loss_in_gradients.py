"""The loss that travels with the gradients instead of in a collective of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.trainer.base import LossModule


class LossInGradients(nn.Module):
    """An objective with one more parameter, whose gradient is the loss: what averages gradients averages it.

    The parameter stays 0, so neither the loss nor its other gradients change. It gets its gradient after all
    others.
    """

    loss_module: LossModule

    def __init__(
        self,
        loss_module: LossModule,
        device: torch.device,
        dtype: torch.dtype,
        numbers: int,
        *,
        at_end: bool,
    ) -> None:
        """Wraps an objective.

        Args:
            loss_module: Gives loss and predictions, as `ReplicaTrainer.loss_module` does.
            device: Of the parameter.
            dtype: Of the parameter: that of the others, to travel in one message with them.
            numbers: 2 where the loss may leave out padding: then also which part of the targets that is.
            at_end: Whether it comes after the others in the order of parameters, too.
        """
        super().__init__()
        # of one dimension: torch's PowerSGD takes no parameters without any
        carrier = nn.Parameter(torch.zeros(numbers, device=device, dtype=dtype))
        # a module of its own: parameters of this one come before those of what is in it
        modules = {"loss_module": loss_module, "carrying": nn.ParameterList([carrier])}
        for name, module in modules.items() if at_end else reversed(modules.items()):
            self.add_module(name, module)
        self._carrier = (carrier,)  # in a tuple, torch finds it once

    def forward(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """As the objective."""
        (carrier,) = self._carrier
        held, *beside = carrier.unbind()  # before the rest: gradients come in the reverse order
        loss, predictions = self.loss_module(inputs, targets)
        if not beside or not loss.dim():
            return torch.addcmul(loss, held, loss.detach()), predictions
        mean, part = loss
        carrying = mean + held * mean.detach() + beside[0] * part
        return torch.stack([carrying, part]), predictions

    def taken(self) -> torch.Tensor | None:
        """What the backward passes since the last call, and the exchange after them, have made of it."""
        (carrier,) = self._carrier
        mean, carrier.grad = carrier.grad, None
        return None if mean is None else mean.squeeze().clone()

    def keeps_summation_order(self, replicas: int, bucket_mib: float) -> bool:
        """Whether gradients with which it travels are added up in the same order as without it.

        Gloo's ring cuts a message into two segments for each replica, in each of which another one begins the
        sums. One more number at the end makes them longer only where the others fill them all.

        Args:
            replicas: That exchange.
            bucket_mib: At which DistributedDataParallel closes its first bucket. Smaller gradients lie in
                one; of larger ones it is known only after a step which are in the last.
        """
        embeddings = (nn.Embedding, nn.EmbeddingBag)
        if any(isinstance(each, embeddings) and each.sparse for each in self.loss_module.modules()):
            return False  # sparse gradients travel apart
        (carrier,) = self._carrier
        beside = [
            weight.numel()
            for weight in self.loss_module.parameters()
            if weight.requires_grad and weight.dtype == carrier.dtype
        ]
        fits = sum(beside) * carrier.element_size() < bucket_mib * (1 << 20)
        return fits and -sum(beside) % (2 * replicas) >= carrier.numel()
