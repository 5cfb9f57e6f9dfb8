"""Loss of a native model: named and custom losses, sample weights, several outputs, and denominators.

A loss that ignores targets or weighs classes gives the mean over what counts. To be averaged over the global
batch, a slice's mean must count by its denominator, the sum of the weights of its targets.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isotrain.adapters.common import callables
from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.torch.loss import functional as losses
from isotrain.adapters.torch.loss.functional import Masked, broadcast_weights
from isotrain.plugin import Component, SpecError, TrainingSpec, unweighted

Denominator = Callable[[Any], Tensor]
"""Function from targets to the sum of their weights, a float64 scalar."""

MEAN_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_REDUCTIONS = (*MEAN_REDUCTIONS, "sum", "none", None)
IGNORE_INDEX = -100
"""Default `ignore_index` of torch's losses, which most data sets use for padding."""
_MEAN_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    losses.mean_squared_error: functional.mse_loss,
    losses.mean_absolute_error: functional.l1_loss,
    losses.huber: functional.huber_loss,
}
"""Torch functions that compute the mean of a named loss in one call, from predictions and targets."""


def denominator_function(component: Component) -> Denominator | None:
    """Denominator of a native model's loss; None if all targets count alike."""
    if component.is_reference:
        return _denominator_of_torch(choices.build_custom(component, "loss"))
    ignored = component.options.get("ignore_class")
    reduction = component.options.get("reduction", MEAN_REDUCTIONS[0])
    if reduction not in MEAN_REDUCTIONS:
        return None
    is_sparse = keras_names.class_name(component.name, "loss") == "SparseCategoricalCrossentropy"
    return (
        functools.partial(_weight_sum, ignored, None) if is_sparse and ignored is not None else None
    )


def _denominator_of_torch(loss: Any) -> Denominator | None:
    """Denominator of torch's cross-entropy or negative log-likelihood, a module or a partial function."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        options = {name: getattr(loss, name) for name in ("ignore_index", "weight", "reduction")}
    elif isinstance(loss, functools.partial) and loss.func in (
        functional.cross_entropy,
        functional.nll_loss,
    ):
        options = dict(loss.keywords)
    else:
        return None
    ignored, weights = options.get("ignore_index", IGNORE_INDEX), options.get("weight")
    if options.get("reduction", "mean") != "mean":
        return None
    return functools.partial(_weight_sum, ignored, weights)


def _ignores_only_padding(denominator: Denominator | None) -> bool:
    """Whether a loss ignores targets of `IGNORE_INDEX`, and counts all others alike."""
    return isinstance(denominator, functools.partial) and denominator.args == (IGNORE_INDEX, None)


def _weight_sum(ignored: int, weights: Tensor | None, targets: Tensor) -> Tensor:
    """Sum of the class weights of targets that are not ignored, a float64 scalar.

    Args:
        ignored: Class that does not count.
        weights: Class weights, shape `[classes]`; None for ones.
        targets: Classes (integers, any shape), or probabilities, shape `[samples, classes, ...]`.
    """
    if targets.is_floating_point():  # of probabilities, torch divides by the number of samples
        return torch.tensor(float(len(targets)), dtype=torch.float64, device=targets.device)
    mask = targets != ignored
    if weights is None:
        return mask.sum(dtype=torch.float64)
    target_weights = weights.to(targets.device)[torch.where(mask, targets, 0)]
    return target_weights.where(mask, 0.0).sum(dtype=torch.float64)


class NamedLoss:
    """A loss that the spec names, with its options: `loss(targets, predictions)`.

    It computes in float32 if the predictions have a 16-bit dtype.
    """

    def __init__(
        self,
        function: Callable[..., Tensor | Masked],
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        """Checks the options.

        Args:
            function: Function of `losses` (loss/functional.py).
            reduction: Keras' name of the reduction over samples.
            name: Ignored, as the loss is always called `loss`.
            dtype: Dtype to compute in; None for that of the predictions.
            options: Options of the function.

        Raises:
            TypeError: The function has no such option.
            ValueError: The value of an option does not exist.
        """
        inspect.signature(function).bind(None, None, **options)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
        self._function = function
        self._options = options
        self._reduction = reduction
        self._dtype = None if dtype is None else getattr(torch, dtype)
        self._mean = self._fused_mean() if reduction in MEAN_REDUCTIONS else None

    def _fused_mean(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Function that computes the mean in one call of torch; None if there is none."""
        function, options = self._function, self._options
        mean_function = _MEAN_FUNCTIONS.get(function)
        if mean_function is not None:

            def mean(targets: Tensor, predictions: Tensor) -> Tensor:
                targets, predictions = losses.same_shape_and_dtype(targets, predictions)
                return mean_function(predictions, targets, **options)

            return mean
        if options.get("from_logits") and set(options) <= {"from_logits"}:
            if function is losses.sparse_categorical_crossentropy:
                return _cross_entropy
            if function is losses.binary_crossentropy:
                return _binary_cross_entropy
        return None

    def __call__(self, targets: Tensor, predictions: Tensor) -> Tensor:
        """Mean over the samples that count, a scalar; or what the option `reduction` says."""
        targets, predictions = self._prepared(targets, predictions)
        if self._mean is not None:
            return self._mean(targets, predictions)
        return self._reduced(self._function(targets, predictions, **self._options))

    def _prepared(self, targets: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and predictions with the same rank, the predictions in the dtype to compute in."""
        if not isinstance(predictions, Tensor):
            raise SpecError(
                "loss: a named loss takes predictions that are one tensor, and the model returned a"
                f" {type(predictions).__name__} of {len(predictions)}. Set a loss for each output"
                " ({output: loss}), or an objective."
            )
        if self._dtype is not None:
            predictions = predictions.to(self._dtype)
        elif predictions.dtype in (torch.bfloat16, torch.float16):
            predictions = predictions.float()
        if targets.dim() != predictions.dim():
            targets, predictions = losses.same_rank(targets, predictions)
        return targets, predictions

    def weighted(self, targets: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
        """Loss with the value of each sample times its weight; reduced as by a call.

        Args:
            targets: Targets, shape `[samples, ...]`.
            predictions: Predictions, shape `[samples, ...]`.
            weights: Sample weights, shape `[samples]` or that of the loss values.

        Raises:
            SpecError: The reduction divides by the sum of the weights.
        """
        if self._reduction == "mean_with_sample_weight":
            raise SpecError(
                "loss: the reduction mean_with_sample_weight is available for portable models only. The loss"
                " of a native model is averaged over the number of samples: use sum_over_batch_size."
            )
        targets, predictions = self._prepared(targets, predictions)
        result = self._function(targets, predictions, **self._options)
        if isinstance(result, Masked):
            return self._reduced(
                result._replace(values=result.values * broadcast_weights(weights, result.values))
            )
        return self._reduced(result * broadcast_weights(weights, result))

    def _reduced(self, result: Tensor | Masked) -> Tensor:
        if self._reduction == "sum":
            values = result.values * result.mask if isinstance(result, Masked) else result
            return values.sum()
        if self._reduction not in MEAN_REDUCTIONS:
            return result.values if isinstance(result, Masked) else result
        if not isinstance(result, Masked):
            return result.mean()
        masked = result.values.where(result.mask, 0.0)
        return masked.sum() / result.mask.sum().clamp_min(1)


def _cross_entropy(targets: Tensor, predictions: Tensor) -> Tensor:
    scores, classes = losses.scores_and_classes(targets, predictions)
    return functional.cross_entropy(scores, classes)


def _binary_cross_entropy(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = losses.same_shape_and_dtype(targets, predictions)
    return functional.binary_cross_entropy_with_logits(predictions, targets)


def build_loss(component: Component) -> Callable[[Any, Any], Any]:
    """Creates a loss from the spec: a `NamedLoss`, or the user's callable.

    Raises:
        SpecError: The name or an option does not exist.
    """
    if not component.is_reference:
        name = choices.snake_case(keras_names.class_name(component.name, "loss"))
        function = losses.FUNCTIONS[name]
        return choices.instantiate(
            lambda **options: NamedLoss(function, **options), component, "loss"
        )
    custom = choices.build_custom(component, "loss")
    if keras_backend.is_keras_instance(custom, "Loss"):
        return custom
    return choices.as_function(custom, component, "loss", squeeze=False)


@dataclass
class PerOutputLoss:
    """Loss of one model output; caches the last mean, so that its metric need not compute it again.

    Attributes:
        output: Name of the output; None for all that the model returns.
        loss: Function of targets and predictions that returns a mean, or values to average.
        loss_denominators: Denominator of the mean; None if all targets count alike.
    """

    output: str | None
    loss: Callable[[Any, Any], Any]
    loss_denominators: Denominator | None
    _latest: tuple[Any, Tensor] | None = None

    def compute(self, targets: Any, predictions: Any, weights: Any | None) -> Tensor:
        """Computes the mean, a scalar, and caches it for `cached_mean`."""
        mean = self.mean(targets, predictions, weights)
        if self.output is not None:
            self._latest = predictions, mean
        return mean

    def cached_mean(self, targets: Any, predictions: Any, weights: Any | None) -> Tensor:
        """The cached mean, a scalar, if it is of these predictions; else computes it. Empties the cache."""
        latest, self._latest = self._latest, None
        if latest is not None and latest[0] is predictions:
            return latest[1]
        return self.mean(targets, predictions, weights)

    def mean(self, targets: Any, predictions: Any, weights: Any | None) -> Tensor:
        """Mean over the samples that count, a scalar.

        Args:
            targets: Targets of this output.
            predictions: Predictions of this output.
            weights: Sample weights, shape `[samples, ...]`; None for ones.
        """
        if weights is None:
            return mean_over_samples(self.loss(targets, predictions))
        if isinstance(self.loss, NamedLoss):
            return mean_over_samples(self.loss.weighted(targets, predictions, weights))
        return _weighted_mean(self.loss(targets, predictions), weights)


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
            PerOutputLoss(output, build_loss(component), denominator_function(component))
            for output, component in spec.losses("torch").items()
        ]
        self._factors = [(spec.loss_weights or {}).get(str(p.output)) for p in self.per_output]
        first = self.per_output[0]
        is_single = len(self.per_output) == 1 and first.output is None
        self.may_ignore_padding = is_single and _ignores_only_padding(first.loss_denominators)
        if self.may_ignore_padding:
            first.loss_denominators = None
        self.counts_samples_equally = all(p.loss_denominators is None for p in self.per_output)
        self._single = first if is_single and first.loss_denominators is None else None

    def __call__(self, targets: Any, predictions: Any) -> Tensor:
        """Loss of a slice.

        Returns:
            The mean, a scalar; `[mean, padding fraction]` (see `_with_padding_fraction`); or, if targets do
            not count alike, shape `[2, losses + 1]` (see `_means_and_denominators`).
        """
        if self._single is not None:
            plain, weights = unweighted(targets)
            mean = self._single.mean(plain, predictions, weights)
            return self._with_padding_fraction(mean, plain) if self.may_ignore_padding else mean
        samples = [self._outputs.sample(targets, predictions, p.output) for p in self.per_output]
        means = [p.compute(*sample) for p, sample in zip(self.per_output, samples, strict=True)]
        means = [m if f is None else m * f for m, f in zip(means, self._factors, strict=True)]
        plain_means = [
            m for m, p in zip(means, self.per_output, strict=True) if p.loss_denominators is None
        ]
        total = _sum(plain_means) if plain_means else torch.zeros_like(means[0])
        if self.counts_samples_equally:
            return total
        return _means_and_denominators(total, means, self.loss_denominators(targets))

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
            None if p.loss_denominators is None else p.loss_denominators(t)
            for p, t in zip(self.per_output, per_output, strict=True)
        ]
        like = next(denominator for denominator in denominators if denominator is not None)
        return torch.stack([torch.zeros_like(like) if d is None else d for d in denominators])


def _sum(means: list[Tensor]) -> Tensor:
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def _means_and_denominators(total: Tensor, means: list[Tensor], denominators: Tensor) -> Tensor:
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


def mean_over_samples(loss: Any) -> Tensor:
    """Mean of what a loss callable returned, a scalar.

    Raises:
        SpecError: It is not a tensor.
    """
    if not isinstance(loss, Tensor):
        loss = callables.require_tensor(loss, "the loss or objective")
    values: Tensor = loss
    return values if values.dim() == 0 else values.mean()


def _weighted_mean(loss: Any, weights: Tensor) -> Tensor:
    """Mean of loss values, shape `[samples, ...]`, each times its sample's weight; a scalar.

    Raises:
        SpecError: The loss is a mean already.
    """
    values: Tensor = callables.require_tensor(loss, "the loss")
    if values.dim() == 0:
        raise SpecError(
            "loss: samples have weights, and the loss returned a mean; expected one value per sample (torch's"
            " losses return them with reduction='none')."
        )
    return (values * broadcast_weights(weights, values)).mean()
