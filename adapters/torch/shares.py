"""What the slices of a step add to the mean loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from isotrain.adapters.torch.exchange import Exchange
from isotrain.adapters.torch.program import Program
from isotrain.plugin import Slice


class Shares:
    """The slices of one replica in one step, of which each counts by its samples, or by what counts in it.

    Losses that do not count all targets alike cost one exchange of a few numbers, others cost none. Used by
    all replicas at the same point.

    Attributes:
        pieces: The slices, one after the other.
        weight: The sum of their weights.
    """

    def __init__(
        self, pieces: Sequence[Slice], program: Program, exchange: Exchange, local: bool = False
    ) -> None:
        """Knows nothing of the loss yet.

        Args:
            pieces: The slices, one after the other.
            program: The replica.
            exchange: Ties it to the others.
            local: Whether gradients are to be those of this replica's own mean.
        """
        self.pieces = pieces
        self._program = program
        self._exchange = exchange
        self._local = local
        self.weight = pieces[0].weight if len(pieces) == 1 else sum(p.weight for p in pieces)
        self._factors: torch.Tensor | None = None

    def of(self, index: int, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A slice's share, as an objective gives its loss.

        Returns:
            What to take gradients of; and the share of the mean loss, without gradients.
        """
        if loss.dim():
            return self._of_rows(index, loss)
        weight = self.pieces[index].weight
        share = loss if weight == 1.0 else loss * weight
        if not self._local or self.weight == 1.0:
            return share, share.detach()
        return loss * (weight / self.weight if weight else 0.0), share.detach()

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
        pieces = self.pieces
        each = [counted]
        if len(pieces) > 1:
            each = [self._program.counted(piece.inputs, piece.targets) for piece in pieces]
        own = torch.stack([c.double() * (p.count > 0) for c, p in zip(each, pieces, strict=True)])
        weights = own.new_tensor([[piece.weight] for piece in pieces])
        total = self._exchange.all_reduce(torch.cat([own, weights], 1).sum(0), "sum")
        return torch.cat([weights, own * (total[-1] / _or_one(total[:-1]))], 1)


class EvaluatedLoss:
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
        mean = sums[0] / counts[0] + (sums[1:] / _or_one(counts[1:])).sum()
        return float(mean)


def _or_one(sums: torch.Tensor) -> torch.Tensor:
    """Sums to divide by, of which some may be 0: so are then their terms."""
    return torch.where(sums > 0, sums, 1.0)
