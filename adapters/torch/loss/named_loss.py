"""A loss of a native model, by its name or a person's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from isotrain.adapters.common import resolve as choices
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.keras import names as keras_names
from isotrain.adapters.torch.loss import functional as losses
from isotrain.adapters.torch.loss.functional import Masked
from isotrain.adapters.torch.loss.normalizer import MEAN_REDUCTIONS
from isotrain.plugin import Component, SpecError

_REDUCTIONS = (*MEAN_REDUCTIONS, "sum", "none", None)
_AT_ONCE: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    losses.mean_squared_error: functional.mse_loss,
    losses.mean_absolute_error: functional.l1_loss,
    losses.huber: functional.huber_loss,
}
"""What torch gives the mean of in one call, from predictions and targets."""


class NamedLoss:
    """A named loss with its options: `loss(targets, predictions)`.

    16-bit predictions are taken as float32.
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
            function: Of `losses`.
            reduction: Of the values of the samples, in Keras' words.
            name: Ignored, as the loss is always called `loss`.
            dtype: Type to compute in; that of the predictions when left out.
            options: Of the function.

        Raises:
            TypeError: The function has no such option.
            ValueError: An option has a value that does not exist.
        """
        inspect.signature(function).bind(None, None, **options)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
        self._function = function
        self._options = options
        self._reduction = reduction
        self._dtype = None if dtype is None else getattr(torch, dtype)
        self._mean = self._at_once() if reduction in MEAN_REDUCTIONS else None

    def _at_once(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The mean in one call of torch, where there is one."""
        function, options = self._function, self._options
        whole = _AT_ONCE.get(function)
        if whole is not None:

            def mean(targets: Tensor, predictions: Tensor) -> Tensor:
                targets, predictions = losses.same_shape_and_dtype(targets, predictions)
                return whole(predictions, targets, **options)

            return mean
        if options.get("from_logits") and set(options) <= {"from_logits"}:
            if function is losses.sparse_categorical_crossentropy:
                return _cross_entropy
            if function is losses.binary_crossentropy:
                return _binary_cross_entropy
        return None

    def __call__(self, targets: Tensor, predictions: Tensor) -> Tensor:
        """The mean over the samples that count, or what the option `reduction` says."""
        targets, predictions = self._arranged(targets, predictions)
        if self._mean is not None:
            return self._mean(targets, predictions)
        return self._reduced(self._function(targets, predictions, **self._options))

    def _arranged(self, targets: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Both in the type to compute in, with as many axes."""
        if not isinstance(predictions, Tensor):
            raise SpecError(
                f"loss: a loss by name is of one tensor, and the model gave a {type(predictions).__name__} of"
                f" {len(predictions)}. Give a loss for each output ({{output: loss}}), or an objective."
            )
        if self._dtype is not None:
            predictions = predictions.to(self._dtype)
        elif predictions.dtype in (torch.bfloat16, torch.float16):
            predictions = predictions.float()
        if targets.dim() != predictions.dim():
            targets, predictions = losses.same_rank(targets, predictions)
        return targets, predictions

    def weighed(self, targets: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
        """As a call, with the value of each sample times its weight.

        Raises:
            SpecError: The mean is to be divided by the sum of the weights.
        """
        if self._reduction == "mean_with_sample_weight":
            raise SpecError(
                "loss: reduction mean_with_sample_weight is for portable models; the mean of a native"
                " model's loss is over the number of samples."
            )
        targets, predictions = self._arranged(targets, predictions)
        given = self._function(targets, predictions, **self._options)
        if isinstance(given, Masked):
            return self._reduced(
                given._replace(
                    values=given.values * losses.broadcast_weights(weights, given.values)
                )
            )
        return self._reduced(given * losses.broadcast_weights(weights, given))

    def _reduced(self, given: Tensor | Masked) -> Tensor:
        if self._reduction == "sum":
            values = given.values * given.mask if isinstance(given, Masked) else given
            return values.sum()
        if self._reduction not in MEAN_REDUCTIONS:
            return given.values if isinstance(given, Masked) else given
        if not isinstance(given, Masked):
            return given.mean()
        counted = given.values.where(given.mask, 0.0)
        return counted.sum() / given.mask.sum().clamp_min(1)


def _cross_entropy(targets: Tensor, predictions: Tensor) -> Tensor:
    scores, classes = losses.scores_and_classes(targets, predictions)
    return functional.cross_entropy(scores, classes)


def _binary_cross_entropy(targets: Tensor, predictions: Tensor) -> Tensor:
    targets, predictions = losses.same_shape_and_dtype(targets, predictions)
    return functional.binary_cross_entropy_with_logits(predictions, targets)


def build_loss(chosen: Component) -> Callable[[Any, Any], Any]:
    """Makes a loss: torch's own by name, or the person's callable.

    Raises:
        SpecError: There is none of that name, or it has no such options.
    """
    if not chosen.is_reference:
        name = choices.snake_case(keras_names.class_name(chosen.name, "loss"))
        function = losses.FUNCTIONS[name]
        return choices.instantiate(lambda **options: NamedLoss(function, **options), chosen, "loss")
    found = choices.build_custom(chosen, "loss")
    if keras_backend.is_keras_instance(found, "Loss"):
        return found
    return choices.as_function(found, chosen, "loss", squeeze=False)
