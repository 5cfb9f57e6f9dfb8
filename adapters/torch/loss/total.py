"""Loss of a native model: the sum of the losses of its outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.torch.loss.per_output import IGNORE_INDEX, build_loss, ignores_only_padding
from isotrain.plugin import TrainingSpec, unweighted


class TotalLoss:
    """Sum of all losses of a spec, with `loss_weights` as factors.

    Attributes:
        per_output: Losses of the outputs.
        counts_samples_equally: Whether all targets count alike in all of them.
        may_ignore_padding: Whether it is a single loss that counts all targets but padding alike.
        is_split: Whether its means are parts of another mean: of the global batch or an evaluation.
    """

    is_split = True

    def __init__(self, spec: TrainingSpec) -> None:
        """Creates the losses.

        Raises:
            SpecError: A name or an option does not exist.
        """
        self._outputs = OutputSelector()
        self.per_output = [
            build_loss(component, output) for output, component in spec.losses("torch").items()
        ]
        self._factors = [(spec.loss_weights or {}).get(str(p.output)) for p in self.per_output]
        first = self.per_output[0]
        is_single = len(self.per_output) == 1 and first.output is None
        self.may_ignore_padding = is_single and ignores_only_padding(first.denominator)
        if self.may_ignore_padding:
            first.denominator = None
        self.counts_samples_equally = all(p.denominator is None for p in self.per_output)
        self._single = first if is_single and first.denominator is None else None

    def __call__(self, targets: Any, predictions: Any) -> Tensor:
        """Loss of a slice.

        Returns:
            The mean, a scalar; `[mean, padding fraction]` (see `_with_padding_fraction`); or, if targets do
            not count alike, shape `[2, losses + 1]` (see `means_and_denominators`).
        """
        if self._single is not None:
            plain, weights = unweighted(targets)
            mean = self._single.mean(plain, predictions, weights)
            return self._with_padding_fraction(mean, plain) if self.may_ignore_padding else mean
        samples = [self._outputs.sample(targets, predictions, p.output) for p in self.per_output]
        means = [p.compute(*sample) for p, sample in zip(self.per_output, samples, strict=True)]
        means = [m if f is None else m * f for m, f in zip(means, self._factors, strict=True)]
        plain_means = [
            m for m, p in zip(means, self.per_output, strict=True) if p.denominator is None
        ]
        total = _sum(plain_means) if plain_means else torch.zeros_like(means[0])
        if self.counts_samples_equally:
            return total
        return means_and_denominators(total, means, self.loss_denominators(targets))

    def _with_padding_fraction(self, mean: Tensor, targets: Tensor) -> Tensor:
        """The mean as if padding counted with a loss of 0, and the fraction of padding, shape `[2]`.

        The mean alone, a scalar, if there is no padding (known on CPUs only), or if the mean is not part of
        another one.
        """
        fraction = self.padding_fraction(targets)
        if fraction.device.type == "cpu" and not fraction:
            return mean
        fraction = fraction.to(mean)
        mean = torch.where(fraction < 1, mean, 0.0)  # torch's mean of nothing is NaN
        if not self.is_split:
            return mean
        return torch.stack([mean * (1 - fraction), fraction])

    @contextlib.contextmanager
    def as_partial_mean(self) -> Iterator[None]:
        """Sets `is_split` within it, for evaluation, whose mean is over all batches."""
        is_split, self.is_split = self.is_split, True
        try:
            yield
        finally:
            self.is_split = is_split

    def padding_fraction(self, targets: Any) -> Tensor:
        """Fraction of the targets that is padding, a float64 scalar."""
        plain, _ = unweighted(targets)
        if plain.is_floating_point():
            return torch.zeros((), dtype=torch.float64, device=plain.device)
        return (plain == IGNORE_INDEX).sum(dtype=torch.float64) / max(1, plain.numel())

    def loss_denominators(self, targets: Any) -> Tensor:
        """Denominators of the losses in a slice, float64 `[losses]`; 0 for those that count samples."""
        per_output = [self._outputs.of_targets(targets, p.output) for p in self.per_output]
        denominators = [
            None if p.denominator is None else p.denominator(t)
            for p, t in zip(self.per_output, per_output, strict=True)
        ]
        like = next(denominator for denominator in denominators if denominator is not None)
        return torch.stack([torch.zeros_like(like) if d is None else d for d in denominators])


def _sum(means: list[Tensor]) -> Tensor:
    """Sum of scalars, from the first to the last."""
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def means_and_denominators(total: Tensor, means: list[Tensor], denominators: Tensor) -> Tensor:
    """Means in row 0 and their denominators in row 1, shape `[2, losses + 1]`.

    Args:
        total: Sum of the means that count samples, a scalar; column 0, with denominator 0.
        means: Mean of each loss, scalars; 0 where the denominator is 0, as torch's mean of nothing is NaN.
        denominators: Denominators, shape `[losses]`.
    """
    zero = torch.zeros_like(total)
    denominators = denominators.to(total)
    finite_means = torch.where(denominators > 0, torch.stack(means), zero)
    return torch.stack(
        [torch.cat([total[None], finite_means]), torch.cat([zero[None], denominators])]
    )
