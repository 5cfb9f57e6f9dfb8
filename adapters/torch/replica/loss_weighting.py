"""Weights of the slices of a step in the mean loss of the global batch, and the mean evaluation loss."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch

from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import ReduceOp, Slice


class SliceWeights:
    """Weights of one replica's slices in one step: by their samples, or by their loss denominators.

    A loss with its own denominator costs one all-reduce of a few numbers, others cost none. Collective: used
    by all replicas at the same point.

    Attributes:
        micro_batches: Slices of the replica, one after the other.
        weight: Sum of the slices' weights.
        is_padding_deferred: Whether shares of the loss have shape `[2]`: the mean with padding counted, and
            the fraction of padding. Their mean over replicas is then to be divided by the rest
            (`without_padding_mean`), and so are the gradients, except in local steps.
    """

    def __init__(
        self,
        micro_batches: Sequence[Slice],
        trainer: ReplicaTrainer,
        communicator: Communicator,
        local: bool = False,
        is_padding_deferred: bool = False,
        part_counts: Sequence[int] | None = None,
    ) -> None:
        """Prepares a step.

        Args:
            micro_batches: Slices of the replica, one after the other.
            trainer: Trainer of the replica.
            communicator: Communicator of the replica.
            local: Whether gradients are those of this replica's mean loss, not of the global one.
            is_padding_deferred: Whether to correct for padding after the all-reduce of gradients and loss.
            part_counts: Number of slices of each replica, where the slices' weights add up to 1 over all
                replicas, and are added in the order of the slices. Slices beyond it count in no sum. None:
                all count, and are added natively.
        """
        self.micro_batches = micro_batches
        self._trainer = trainer
        self._communicator = communicator
        self._local = local
        self._part_counts = part_counts
        self.is_padding_deferred = (is_padding_deferred or local) and trainer.may_ignore_padding
        self.weight = (
            micro_batches[0].weight
            if len(micro_batches) == 1
            else sum(p.weight for p in micro_batches)
        )
        self._factors: torch.Tensor | None = None
        self._unpadded_weight: torch.Tensor | None = None

    def of(self, index: int, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighs the loss of a slice.

        Args:
            index: Index of the slice.
            loss: Loss of the slice, of any shape that `LossModule` names.

        Returns:
            The scalar to differentiate; and the slice's share of the mean loss, detached: a scalar, or
            shape `[2]` where `is_padding_deferred`.
        """
        if self._trainer.may_ignore_padding:
            return self._without_padding(index, loss)
        if loss.dim():
            return self._weigh_means(index, loss)
        weight = self.micro_batches[index].weight
        share = loss if weight == 1.0 else loss * weight
        if not self._local or self.weight == 1.0:
            return share, share.detach()
        return loss * (weight / self.weight if weight else 0.0), share.detach()

    def _without_padding(self, index: int, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighs a loss that is a scalar mean, or `[mean, fraction of padding]`."""
        mean, padding = loss if loss.dim() else (loss, loss.new_zeros(()))
        weight = self.micro_batches[index].weight
        share = mean if weight == 1.0 else mean * weight
        reported = (
            torch.stack([share.detach(), padding * weight]) if self.is_padding_deferred else None
        )
        if reported is not None and not self._local:
            return share, reported
        if self._unpadded_weight is None:
            self._unpadded_weight = self._weight_without_padding()
        scaled = mean * (weight / _nonzero(self._unpadded_weight)).to(mean)
        return scaled, scaled.detach() if reported is None else reported

    def _weight_without_padding(self) -> torch.Tensor:
        """Weight of the targets that are not padding, a scalar: this replica's, or the mean over replicas."""
        padding = torch.stack(
            [p.weight * self._trainer.padding_fraction(p.targets) for p in self.micro_batches]
        )
        if self._local:
            return self.weight - padding.sum()
        return 1 - self._over_replicas(padding, "mean")

    def _weigh_means(self, index: int, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighs a loss of shape `[2, 1 + losses]`: means, and denominators."""
        means, denominators = loss
        if self._factors is None:
            self._factors = self._mean_factors(denominators[1:].detach()).to(means)
        share = (means.detach() * self._factors[index]).sum()
        factors = self._factors / _nonzero(self._factors.sum(0)) if self._local else self._factors
        return (means * factors[index]).sum(), share

    def _mean_factors(self, denominators: torch.Tensor) -> torch.Tensor:
        """Factors of each mean of each slice in the global mean loss: float64, shape `[slices, 1 + losses]`.

        Args:
            denominators: Denominators of the first slice, shape `[losses]`; used if it is the only one.
        """
        micro_batches = self.micro_batches
        per_slice = [denominators]
        if len(micro_batches) > 1:
            per_slice = [
                self._trainer.loss_denominators(micro_batch.inputs, micro_batch.targets)
                for micro_batch in micro_batches
            ]
        local = torch.stack(
            [d.double() * (m.count > 0) for d, m in zip(per_slice, micro_batches, strict=True)]
        )
        weights = local.new_tensor([[micro_batch.weight] for micro_batch in micro_batches])
        total = self._over_replicas(torch.cat([local, weights], 1), "sum")
        return torch.cat([weights, local * (total[-1] / _nonzero(total[:-1]))], 1)

    def _over_replicas(self, values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Sum of float64 values of each slice, shape `[slices, ...]`, over slices and, by `op`, replicas.

        Weights that add up to 1 make means, and not sums.
        """
        if self._part_counts is None:
            return self._communicator.all_reduce(values.sum(0), op)
        count = self._part_counts[self._communicator.rank]
        padded = values.new_zeros((max(self._part_counts), *values.shape[1:]))
        padded[:count] = values[:count]
        by_replica = self._communicator.all_gather(padded)
        return functools.reduce(operator.add, by_replica.flatten(0, 1))


class EvaluationLoss:
    """Accumulator of the mean evaluation loss, each loss divided by its own denominator."""

    def __init__(self, losses: int, device: torch.device) -> None:
        """Starts with no samples.

        Args:
            losses: Largest number of losses with a denominator each.
            device: Device of the accumulators.
        """
        self._sums = torch.zeros(2, 1 + losses, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, count: int) -> None:
        """Adds the loss of some samples.

        Args:
            loss: Loss, of any shape that `LossModule` names.
            count: Number of samples.
        """
        if loss.dim() == 0:
            self._sums[0, 0] += loss.double() * count
        elif loss.dim() == 1:
            mean, padding = loss.double()
            self._sums[0, 0] += mean * count
            self._sums[1, 0] -= padding * count
        else:
            means, denominators = loss.double()
            sums = self._sums[:, : len(means)]
            sums[0] += means * torch.cat([denominators.new_tensor([count]), denominators[1:]])
            sums[1, 1:] += denominators[1:]
        self._sums[1, 0] += count

    @property
    def sums(self) -> torch.Tensor:
        """Sums of losses, and of their denominators: float64, shape `[2, 1 + losses]`."""
        return self._sums

    def pop_mean(self, total: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Mean loss over the samples of all replicas; resets the accumulators. Collective.

        Args:
            total: All-reduce sum, of a tensor of any shape, over all replicas.
        """
        sums, counts = total(self._sums)
        self._sums.zero_()
        mean = sums[0] / _nonzero(counts[0]) + (sums[1:] / _nonzero(counts[1:])).sum()
        return float(mean)


def without_padding_mean(total: torch.Tensor) -> torch.Tensor:
    """Mean loss over targets that are not padding, a scalar.

    Args:
        total: Means over replicas, shape `[2]`: the loss with padding counted, and the fraction of padding.
    """
    loss, padding_fraction = total.unbind()
    return loss / _nonzero(1 - padding_fraction)


def _nonzero(sums: torch.Tensor) -> torch.Tensor:
    """Denominators with zeros replaced by 1 (their numerators are 0 too); any shape."""
    return torch.where(sums > 0, sums, 1.0)
