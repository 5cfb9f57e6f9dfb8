"""The loss of a native model: of each output, weighed by samples, and by what its mean counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from isotrain.adapters.common import callables
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.torch.loss.functional import broadcast_weights
from isotrain.adapters.torch.loss.named_loss import NamedLoss, build_loss
from isotrain.adapters.torch.loss.normalizer import (
    IGNORE_INDEX,
    Denominator,
    denominator_function,
    ignores_only_padding,
)
from isotrain.plugin import SpecError, TrainingSpec, unweighted


@dataclass
class PerOutputLoss:
    """The loss of one output; that of a slice is computed once.

    Attributes:
        output: Its name; None for what the model gives.
        loss: From targets and predictions to a mean, or to values whose mean it is.
        loss_denominators: What it counts by; None where all targets count alike.
    """

    output: str | None
    loss: Callable[[Any, Any], Any]
    loss_denominators: Denominator | None
    _latest: tuple[Any, torch.Tensor] | None = None

    def remembered(self, targets: Any, predictions: Any, weights: Any | None) -> torch.Tensor:
        """As `mean`, which remembers it until it is measured."""
        mean = self.mean(targets, predictions, weights)
        if self.output is not None:
            self._latest = predictions, mean
        return mean

    def measured(self, targets: Any, predictions: Any, weights: Any | None) -> torch.Tensor:
        """The mean of the slice that was computed last, if these are its predictions; else anew."""
        latest, self._latest = self._latest, None
        if latest is not None and latest[0] is predictions:
            return latest[1]
        return self.mean(targets, predictions, weights)

    def mean(self, targets: Any, predictions: Any, weights: Any | None) -> torch.Tensor:
        """The mean over what counts, each sample times its weight."""
        if weights is None:
            return mean_over_samples(self.loss(targets, predictions))
        if isinstance(self.loss, NamedLoss):
            return mean_over_samples(self.loss.weighed(targets, predictions, weights))
        return _weighed(self.loss(targets, predictions), weights)


def per_output_losses(spec: TrainingSpec) -> list[PerOutputLoss]:
    """The spec's losses.

    Raises:
        SpecError: There is none of a name, or it has no such options.
    """
    return [
        PerOutputLoss(output, build_loss(chosen), denominator_function(chosen))
        for output, chosen in spec.losses("torch").items()
    ]


class TotalLoss:
    """All losses of a spec.

    Attributes:
        parts: Each of them.
        counts_samples_equally: Whether all targets count alike in all of them.
        may_ignore_padding: Whether it is one loss that counts all targets alike but padding.
        is_split: Whether its means are parts of another mean.
    """

    is_split = True

    def __init__(self, spec: TrainingSpec) -> None:
        """Makes them.

        Raises:
            SpecError: There is none of a name, or it has no such options.
        """
        self._outputs = OutputSelector()
        self.parts = per_output_losses(spec)
        self._factors = [(spec.loss_weights or {}).get(str(p.output)) for p in self.parts]
        first = self.parts[0]
        is_one = len(self.parts) == 1 and first.output is None
        self.may_ignore_padding = is_one and ignores_only_padding(first.loss_denominators)
        if self.may_ignore_padding:
            first.loss_denominators = None
        self.counts_samples_equally = all(part.loss_denominators is None for part in self.parts)
        self._only = self.parts[0] if self._is_one else None

    @property
    def _is_one(self) -> bool:
        """Whether it is a single loss of all that the model gives, and counts all targets alike."""
        first, *others = self.parts
        return not others and first.output is None and first.loss_denominators is None

    def __call__(self, targets: Any, predictions: Any) -> torch.Tensor:
        """The loss of a slice, as an objective gives it."""
        if self._only is not None:
            plain, weights = unweighted(targets)
            mean = self._only.mean(plain, predictions, weights)
            return self._with_padding_fraction(mean, plain) if self.may_ignore_padding else mean
        samples = [self._outputs.sample(targets, predictions, p.output) for p in self.parts]
        means = [part.remembered(*own) for part, own in zip(self.parts, samples, strict=True)]
        means = [m if f is None else m * f for m, f in zip(means, self._factors, strict=True)]
        alike = [m for m, p in zip(means, self.parts, strict=True) if p.loss_denominators is None]
        total = _sum(alike) if alike else torch.zeros_like(means[0])
        if self.counts_samples_equally:
            return total
        return _means_and_denominators(total, means, self.loss_denominators(targets))

    def _with_padding_fraction(self, mean: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean as if padding counted and had a loss of 0, and which part of the targets it is.

        That is a vector of two; the mean alone, where it is known that there is none, or where it is no part
        of another.
        """
        part = self.padding_fraction(targets)
        if part.device.type == "cpu" and not part:
            return mean
        part = part.to(mean)
        mean = torch.where(part < 1, mean, 0.0)  # torch's mean of nothing is no number
        if not self.is_split:
            return mean
        return torch.stack([mean * (1 - part), part])

    @contextlib.contextmanager
    def as_partial_mean(self) -> Iterator[None]:
        """Gives means as parts of another mean, as evaluation needs them: it is over all of its batches."""
        is_split, self.is_split = self.is_split, True
        try:
            yield
        finally:
            self.is_split = is_split

    def padding_fraction(self, targets: Any) -> torch.Tensor:
        """Which part of the targets is padding, a float64 scalar."""
        plain, _ = unweighted(targets)
        if plain.is_floating_point():
            return torch.zeros((), dtype=torch.float64, device=plain.device)
        return (plain == IGNORE_INDEX).sum(dtype=torch.float64) / max(1, plain.numel())

    def loss_denominators(self, targets: Any) -> torch.Tensor:
        """What each loss counts by in a slice, shape `[losses]`; 0 for those that count samples."""
        own = [self._outputs.of_targets(targets, part.output) for part in self.parts]
        counts = [
            None if part.loss_denominators is None else part.loss_denominators(t)
            for part, t in zip(self.parts, own, strict=True)
        ]
        like = next(count for count in counts if count is not None)
        return torch.stack([torch.zeros_like(like) if c is None else c for c in counts])


def _sum(means: list[torch.Tensor]) -> torch.Tensor:
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def _means_and_denominators(
    total: torch.Tensor, means: list[torch.Tensor], counted: torch.Tensor
) -> torch.Tensor:
    """Torch's mean of nothing is no number: it is 0 here."""
    zero = torch.zeros_like(total)
    counted = counted.to(total)
    each = torch.where(counted > 0, torch.stack(means), zero)
    return torch.stack([torch.cat([total[None], each]), torch.cat([zero[None], counted])])


def mean_over_samples(loss: Any) -> torch.Tensor:
    """Reduces what a loss callable gave to the mean over its samples.

    Raises:
        SpecError: It gave no tensor.
    """
    if not isinstance(loss, torch.Tensor):
        loss = callables.require_tensor(loss, "the loss or objective")
    given: torch.Tensor = loss
    return given if given.dim() == 0 else given.mean()


def _weighed(loss: Any, weights: torch.Tensor) -> torch.Tensor:
    """The mean of values, each times its sample's weight.

    Raises:
        SpecError: The loss gave their mean already.
    """
    values: torch.Tensor = callables.require_tensor(loss, "the loss")
    if values.dim() == 0:
        raise SpecError(
            "loss: samples have weights, and it returned their mean; expected one value per sample (torch's"
            " losses give them with reduction='none')."
        )
    return (values * broadcast_weights(weights, values)).mean()
