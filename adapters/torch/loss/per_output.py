"""Loss of one output of a native model: named and custom losses, sample weights, and denominators.

A loss that ignores targets or weighs classes gives the mean over what counts. To be averaged over the global
batch, a slice's mean must count by its denominator, the sum of the weights of its targets.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isotrain.adapters.common import callables
from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.torch.loss import functional as losses
from isotrain.adapters.torch.loss.functional import MEAN_REDUCTIONS, Masked
from isotrain.adapters.torch.loss.shapes import (
    broadcast_weights,
    classes_and_scores,
    same_rank,
    same_shape_and_dtype,
)
from isotrain.plugin import Component, SpecError

Denominator = Callable[[Any], Tensor]
"""Function from targets to the sum of their weights, a float64 scalar."""

IGNORE_INDEX = -100
"""Default `ignore_index` of torch's losses, which most data sets use for padding."""
_REDUCTIONS = (*MEAN_REDUCTIONS, "sum", "none", None)
FusedMean = tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], Callable[..., Tensor]]
"""A torch function that computes a mean loss from predictions and targets, and the function before it, which
brings targets and predictions into the shapes and dtypes that it takes."""
_FUSED_MEANS: Mapping[Callable[..., Any], FusedMean] = {
    losses.mean_squared_error: (same_shape_and_dtype, functional.mse_loss),
    losses.mean_absolute_error: (same_shape_and_dtype, functional.l1_loss),
    losses.huber: (same_shape_and_dtype, functional.huber_loss),
}
"""Fused means of named losses."""
_FUSED_MEANS_OF_LOGITS: Mapping[Callable[..., Any], FusedMean] = {
    losses.sparse_categorical_crossentropy: (
        classes_and_scores,
        losses.mean_sparse_categorical_crossentropy,
    ),
    losses.binary_crossentropy: (
        same_shape_and_dtype,
        functional.binary_cross_entropy_with_logits,
    ),
}
"""Fused means of named losses whose only option is `from_logits`."""


class PerOutputLoss(ABC):
    """Loss of one model output; caches the last mean, so that its metric need not compute it again.

    Attributes:
        output: Name of the output; None for all that the model returns.
        denominator: Denominator of the mean as a function of the targets; None if all count alike.
    """

    def __init__(self, output: str | None, denominator: Denominator | None) -> None:
        self.output = output
        self.denominator = denominator
        self._latest: tuple[Any, Tensor] | None = None

    @abstractmethod
    def mean(self, targets: Any, predictions: Any, weights: Tensor | None = None) -> Tensor:
        """Mean over the samples that count, a scalar; named losses may have another `reduction`.

        Args:
            targets: Targets of this output, shape `[samples, ...]`.
            predictions: Predictions of this output, shape `[samples, ...]`.
            weights: Factors of the loss values, shape `[samples, ...]`; None for ones.

        Raises:
            SpecError: The loss does not support weights, or these targets and predictions.
        """

    def compute(self, targets: Any, predictions: Any, weights: Tensor | None) -> Tensor:
        """Computes the mean, a scalar, and caches it for `cached_mean`."""
        mean = self.mean(targets, predictions, weights)
        if self.output is not None:
            self._latest = predictions, mean
        return mean

    def cached_mean(self, targets: Any, predictions: Any, weights: Tensor | None) -> Tensor:
        """The cached mean, a scalar, if it is of these predictions; else computes it. Empties the cache."""
        latest, self._latest = self._latest, None
        if latest is not None and latest[0] is predictions:
            return latest[1]
        return self.mean(targets, predictions, weights)


class NamedLoss(PerOutputLoss):
    """A loss that the spec names, with its options.

    It computes in float32 if the predictions have a 16-bit dtype.
    """

    def __init__(
        self,
        function: Callable[..., Tensor | Masked],
        output: str | None,
        denominator: Denominator | None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        """Checks the options.

        Args:
            function: Function of `losses` (loss/functional.py).
            output: Name of the output; None for all that the model returns.
            denominator: Denominator of the mean; None if all targets count alike.
            reduction: Keras' name of the reduction over samples.
            name: Ignored, as the loss is always called `loss`.
            dtype: Dtype to compute in; None for that of the predictions.
            options: Options of the function.

        Raises:
            TypeError: The function has no such option.
            ValueError: The value of an option does not exist.
        """
        super().__init__(output, denominator)
        inspect.signature(function).bind(None, None, **options)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
        self._function = functools.partial(function, **options)
        self._reduction = reduction
        self._dtype = None if dtype is None else getattr(torch, dtype)
        self._fused_mean = _fused_mean(function, options) if reduction in MEAN_REDUCTIONS else None

    def compute_by(self, function: Callable[[Tensor, Tensor], Tensor | Masked]) -> None:
        """Computes loss values by another function of targets and predictions from now on."""
        self._function, self._fused_mean = functools.partial(function), None

    def mean(self, targets: Tensor, predictions: Any, weights: Tensor | None = None) -> Tensor:
        targets, predictions = self._prepared(targets, predictions)
        if self._fused_mean is not None and weights is None:
            arrange, torch_mean = self._fused_mean
            targets, predictions = arrange(targets, predictions)
            return torch_mean(predictions, targets)
        values = self._function(targets, predictions)
        if weights is not None:
            values = self._weighted(values, weights)
        return mean_over_samples(self._reduced(values))

    def _prepared(self, targets: Tensor, predictions: Any) -> tuple[Tensor, Tensor]:
        """Targets and predictions (any shape) with the same rank, predictions in the dtype to compute in.

        Raises:
            SpecError: The predictions are not one tensor.
        """
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
            targets, predictions = same_rank(targets, predictions)
        return targets, predictions

    def _weighted(self, values: Tensor | Masked, weights: Tensor) -> Tensor | Masked:
        """Loss values, shape `[samples, ...]`, times weights of that shape or of its first axes.

        Raises:
            SpecError: The reduction divides by the sum of the weights.
        """
        if self._reduction == "mean_with_sample_weight":
            raise SpecError(
                "loss: the reduction mean_with_sample_weight is available for portable models only. The loss"
                " of a native model is averaged over the number of samples: use sum_over_batch_size."
            )
        if isinstance(values, Masked):
            return values._replace(values=values.values * broadcast_weights(weights, values.values))
        return values * broadcast_weights(weights, values)

    def _reduced(self, result: Tensor | Masked) -> Tensor:
        """Scalar to which loss values, shape `[samples, ...]`, are reduced; the values if they are not."""
        if self._reduction == "sum":
            values = result.values * result.mask if isinstance(result, Masked) else result
            return values.sum()
        if self._reduction not in MEAN_REDUCTIONS:
            return result.values if isinstance(result, Masked) else result
        if not isinstance(result, Masked):
            return result.mean()
        masked = result.values.where(result.mask, 0.0)
        return masked.sum() / result.mask.sum().clamp_min(1)


def _fused_mean(function: Callable[..., Any], options: Mapping[str, Any]) -> FusedMean | None:
    """Fused mean of a named loss with these options; None if torch has none."""
    if options.get("from_logits") and len(options) == 1:
        return _FUSED_MEANS_OF_LOGITS.get(function)
    if function not in _FUSED_MEANS:
        return None
    arrange, torch_mean = _FUSED_MEANS[function]
    return arrange, functools.partial(torch_mean, **options) if options else torch_mean


class CustomLoss(PerOutputLoss):
    """A loss that the user gave, such as a torch module: a function of targets and predictions."""

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        output: str | None,
        denominator: Denominator | None,
    ) -> None:
        super().__init__(output, denominator)
        self._function = function

    def mean(self, targets: Any, predictions: Any, weights: Tensor | None = None) -> Tensor:
        values = self._function(targets, predictions)
        return mean_over_samples(values if weights is None else _weighted(values, weights))


def _weighted(loss: Any, weights: Tensor) -> Tensor:
    """A custom loss's values, shape `[samples, ...]`, each times its sample's weight.

    Raises:
        SpecError: The loss is a mean already.
    """
    values: Tensor = callables.require_tensor(loss, "the loss")
    if values.dim() == 0:
        raise SpecError(
            "loss: samples have weights, and the loss returned a mean; expected one value per sample (torch's"
            " losses return them with reduction='none')."
        )
    return values * broadcast_weights(weights, values)


def mean_over_samples(loss: Any) -> Tensor:
    """Mean of what a loss callable returned (any shape), a scalar.

    Raises:
        SpecError: It is not a tensor.
    """
    if not isinstance(loss, Tensor):
        loss = callables.require_tensor(loss, "the loss or objective")
    values: Tensor = loss
    return values if values.dim() == 0 else values.mean()


def build_loss(component: Component, output: str | None = None) -> PerOutputLoss:
    """Creates the loss of one output from the spec.

    Raises:
        SpecError: The name or an option does not exist.
    """
    if not component.is_reference:
        name = choices.snake_case(keras_names.class_name(component.name, "loss"))
        denominator = denominator_of_named(name, component.options)
        make = functools.partial(NamedLoss, losses.FUNCTIONS[name], output, denominator)
        loss: NamedLoss = choices.instantiate(make, component, "loss")
        return loss
    function = custom = choices.build_custom(component, "loss")
    if not keras_backend.is_keras_instance(custom, "Loss"):
        function = choices.as_function(custom, component, "loss", squeeze=False)
    return CustomLoss(function, output, denominator_of_custom(custom))


def denominator_of_named(name: str, options: Mapping[str, Any]) -> Denominator | None:
    """Denominator of a loss that the spec names, with its options; None if all targets count alike."""
    ignored = options.get("ignore_class")
    is_mean = options.get("reduction", MEAN_REDUCTIONS[0]) in MEAN_REDUCTIONS
    if name != "sparse_categorical_crossentropy" or ignored is None or not is_mean:
        return None
    return functools.partial(_weight_sum, ignored, None)


def denominator_of_custom(loss: Any) -> Denominator | None:
    """Denominator of a custom loss; None if all targets count alike.

    Those with a denominator are torch's cross-entropy and negative log-likelihood, a module or a partial
    function, with the reduction `mean`.
    """
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


def ignores_only_padding(denominator: Denominator | None) -> bool:
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
