"""What the slices of a step add to the mean loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import Slice


class SliceWeights:
    """The slices of one replica in one step, of which each counts by its samples, or by what counts in it.

    Losses that do not count all targets alike cost one exchange of a few numbers, others cost none. Used by
    all replicas at the same point.

    Attributes:
        micro_batches: The slices, one after the other.
        weight: The sum of their weights.
        is_padding_deferred: Whether shares of the loss are vectors of two, the mean as if padding counted
            and which part of the targets that is: their mean is to be divided by the rest
            (`without_padding_mean`), and but
            for local steps the gradients are too.
    """

    def __init__(
        self,
        micro_batches: Sequence[Slice],
        trainer: ReplicaTrainer,
        communicator: Communicator,
        local: bool = False,
        is_padding_deferred: bool = False,
    ) -> None:
        """Knows nothing of the loss yet.

        Args:
            micro_batches: The slices, one after the other.
            trainer: The replica.
            communicator: Ties it to the others.
            local: Whether gradients are to be those of this replica's own mean.
            is_padding_deferred: Whether padding is made up for when gradients and loss have been exchanged.
        """
        self.micro_batches = micro_batches
        self._trainer = trainer
        self._communicator = communicator
        self._local = local
        self.is_padding_deferred = (is_padding_deferred or local) and trainer.may_ignore_padding
        self.weight = (
            micro_batches[0].weight
            if len(micro_batches) == 1
            else sum(p.weight for p in micro_batches)
        )
        self._factors: torch.Tensor | None = None
        self._counted: torch.Tensor | None = None

    def of(self, index: int, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A slice's share, as an objective gives its loss.

        Returns:
            What to take gradients of; and the share of the mean loss, without gradients.
        """
        if self._trainer.may_ignore_padding:
            return self._without_padding(index, loss)
        if loss.dim():
            return self._of_rows(index, loss)
        weight = self.micro_batches[index].weight
        share = loss if weight == 1.0 else loss * weight
        if not self._local or self.weight == 1.0:
            return share, share.detach()
        return loss * (weight / self.weight if weight else 0.0), share.detach()

    def _without_padding(self, index: int, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The share of a slice whose loss is a mean, or a mean and which part of the targets is padding."""
        mean, padding = loss if loss.dim() else (loss, loss.new_zeros(()))
        weight = self.micro_batches[index].weight
        share = mean if weight == 1.0 else mean * weight
        reported = (
            torch.stack([share.detach(), padding * weight]) if self.is_padding_deferred else None
        )
        if reported is not None and not self._local:
            return share, reported
        if self._counted is None:
            self._counted = self._part_that_counts()
        scaled = mean * (weight / _or_one(self._counted)).to(mean)
        return scaled, scaled.detach() if reported is None else reported

    def _part_that_counts(self) -> torch.Tensor:
        """The weight of the targets that are no padding, a scalar: this replica's, or the mean over all."""
        padding = torch.stack(
            [p.weight * self._trainer.padding_fraction(p.targets) for p in self.micro_batches]
        )
        if self._local:
            return self.weight - padding.sum()
        return 1 - self._communicator.all_reduce(padding.sum(), "mean")

    def _of_rows(self, index: int, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        means, counted = loss
        if self._factors is None:
            self._factors = self._all_factors(counted[1:].detach()).to(means)
        share = (means.detach() * self._factors[index]).sum()
        own = self._factors / _or_one(self._factors.sum(0)) if self._local else self._factors
        return (means * own[index]).sum(), share

    def _all_factors(self, counted: torch.Tensor) -> torch.Tensor:
        """By what each mean of each slice is multiplied: shape `[slices, 1 + losses]`.

        Args:
            counted: What the losses of the only slice count by.
        """
        micro_batches = self.micro_batches
        each = [counted]
        if len(micro_batches) > 1:
            each = [
                self._trainer.loss_denominators(micro_batch.inputs, micro_batch.targets)
                for micro_batch in micro_batches
            ]
        own = torch.stack(
            [c.double() * (p.count > 0) for c, p in zip(each, micro_batches, strict=True)]
        )
        weights = own.new_tensor([[micro_batch.weight] for micro_batch in micro_batches])
        total = self._communicator.all_reduce(torch.cat([own, weights], 1).sum(0), "sum")
        return torch.cat([weights, own * (total[-1] / _or_one(total[:-1]))], 1)


class EvaluationLoss:
    """The mean of the losses over all that was evaluated, each over what counts in it."""

    def __init__(self, losses: int, device: torch.device) -> None:
        """Starts with no samples.

        Args:
            losses: How many the spec has.
            device: Where to add up.
        """
        self._sums = torch.zeros(2, 1 + losses, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, count: int) -> None:
        """Adds the loss of so many samples, as an objective gives it."""
        if loss.dim() == 0:
            self._sums[0, 0] += loss.double() * count
        elif loss.dim() == 1:
            mean, part = loss.double()
            self._sums[0, 0] += mean * count
            self._sums[1, 0] -= part * count
        else:
            means, counted = loss.double()
            self._sums[0] += means * torch.cat([counted.new_tensor([count]), counted[1:]])
            self._sums[1, 1:] += counted[1:]
        self._sums[1, 0] += count

    def taken(self, total: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """The mean; starts anew.

        Args:
            total: Sums a tensor over all replicas.
        """
        sums, counts = total(self._sums)
        self._sums.zero_()
        mean = sums[0] / _or_one(counts[0]) + (sums[1:] / _or_one(counts[1:])).sum()
        return float(mean)


def without_padding_mean(total: torch.Tensor) -> torch.Tensor:
    """The mean loss over what counts, from the mean of shares of two numbers."""
    loss, padding_fraction = total.unbind()
    return loss / _or_one(1 - padding_fraction)


def _or_one(sums: torch.Tensor) -> torch.Tensor:
    """Sums to divide by, of which some may be 0: so are then their terms."""
    return torch.where(sums > 0, sums, 1.0)
