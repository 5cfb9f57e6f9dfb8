"""The arithmetic of Keras' optimizers by torch's kernels over all weights at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.torch.base import private_api
from isotrain.plugin import CustomOptimizer, TrainingSpec

_NUMBERS: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}
Norms = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Gives the norm of each of some tensors."""
_LATE = 1e9
"""A step at which torch's own bias correction is 1: Keras' correction is part of the rate."""


@dataclass(eq=False, slots=True)
class _Step:
    """What one update is made of.

    Attributes:
        options: The Keras optimizer.
        weights: To update, in place.
        gradients: As they are to be used.
        slots: Of the optimizer by kind, one for each weight; updated in place.
        number: The type that Keras computes rates in.
        rate: Of this update.
        count: Of this update, from 1 on.
        norms: Gives those of tensors that lie as the weights do.
    """

    options: Any
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    slots: dict[str, list[torch.Tensor]]
    number: type[np.floating[Any]]
    rate: float
    count: int
    norms: Norms

    def corrections(self) -> tuple[Any, Any]:
        """1 less the powers of both betas, in Keras' type."""
        step = self.number(self.count)
        first, second = self.number(self.options.beta_1), self.number(self.options.beta_2)
        return 1 - first**step, 1 - second**step


class KerasUpdate:
    """Updates weights and slots of a Keras optimizer as its `apply` does."""

    def __init__(
        self,
        spec: TrainingSpec,
        optimizer: Any,
        weights: list[torch.Tensor],
        norms: Norms = private_api.foreach_norm,
    ) -> None:
        """Takes over the optimizer's own slots.

        Args:
            spec: Names the optimizer.
            optimizer: Built on the weights.
            weights: All of one type.
            norms: Gives those of tensors that lie as the weights do.
        """
        self._kernel = _KERNELS[spec.optimizer.name]
        self._options = optimizer
        self._norms = norms
        self._weights = weights
        self._slots = {
            kind: [variable.value for variable in variables]
            for kind, variables in keras_private.slots_of(optimizer).items()
        }
        self._number = _NUMBERS[weights[0].dtype]
        self._iterations = optimizer.iterations.value
        self._done: int | None = None
        self.rate = float(optimizer.learning_rate.value)

    def forget(self) -> None:
        """Reads the number of updates anew: somebody has written it."""
        self._done = None

    def __call__(self, gradients: list[torch.Tensor]) -> None:
        """Updates every weight; the gradients stay as they are."""
        if self._done is None:
            self._done = int(self._iterations)
        self._done += 1
        rate = self._number(self.rate)
        decay = self._options.weight_decay
        given = [gradient.contiguous() for gradient in gradients]
        bounded = clipped(given, self._options, self._norms)
        if decay:
            private_api.foreach_mul_(self._weights, float(1 - self._number(decay) * rate))
        self._kernel(
            _Step(
                self._options,
                self._weights,
                bounded,
                self._slots,
                self._number,
                float(rate),
                self._done,
                self._norms,
            )
        )
        self._iterations.add_(1)


def keras_update(
    spec: TrainingSpec,
    optimizer: Any,
    variables: Sequence[Any],
    norms: Norms = private_api.foreach_norm,
) -> KerasUpdate | None:
    """The update for a spec's optimizer; None where only Keras' own `apply` does what it says.

    That is so for optimizers of one's own, with loss scaling, and for weights that have constraints, types
    of their own or strides of their own.

    Args:
        spec: Names the optimizer.
        optimizer: Built on the variables.
        variables: To update.
        norms: Gives those of tensors that lie as their values do.
    """
    weights = [variable.value for variable in variables]
    if isinstance(spec.optimizer, CustomOptimizer) or not weights:
        return None
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    constrained = any(variable.constraint is not None for variable in variables)
    types = {weight.dtype for weight in weights}
    strided = not all(weight.is_contiguous() for weight in weights)
    if scaled or constrained or strided or len(types) > 1 or not types <= set(_NUMBERS):
        return None
    return KerasUpdate(spec, optimizer, weights, norms)


def clipped(gradients: list[torch.Tensor], options: Any, norms: Norms) -> list[torch.Tensor]:
    """Gradients as Keras clips them: each by its norm, all by their global norm, or by value.

    Args:
        gradients: Tensors of any shapes, contiguous.
        options: An optimizer with `clipnorm`, `global_clipnorm` and `clipvalue`, of which one is a number.
        norms: Gives the L2 norm of each of some tensors.
    """
    if options.clipnorm:
        found = torch.stack(norms(gradients))
        factors = options.clipnorm / found.clamp(min=options.clipnorm)
        return list(private_api.foreach_mul(gradients, list(factors.unbind())))
    if options.global_clipnorm:
        norm = torch.linalg.vector_norm(torch.stack(norms(gradients)))
        return clipped_by(norm, gradients, options.global_clipnorm)
    if options.clipvalue:
        below = private_api.foreach_clamp_max(gradients, options.clipvalue)
        return list(private_api.foreach_clamp_min(below, -options.clipvalue))
    return gradients


def clipped_by(norm: torch.Tensor, gradients: list[Any], bound: float) -> list[Any]:
    """Gradients as Keras clips them by the norm of all."""
    return list(private_api.foreach_mul(gradients, bound * torch.clamp(1 / norm, max=1 / bound)))


def _sgd(step: _Step) -> None:
    momentum = step.options.momentum
    if not momentum:
        private_api.foreach_add_(step.weights, step.gradients, alpha=-step.rate)
        return
    momenta = step.slots["momentum"]
    private_api.foreach_mul_(momenta, momentum)
    private_api.foreach_add_(momenta, step.gradients, alpha=-step.rate)
    if step.options.nesterov:
        private_api.foreach_add_(step.weights, step.gradients, alpha=-step.rate)
        private_api.foreach_add_(step.weights, momenta, alpha=momentum)
    else:
        private_api.foreach_add_(step.weights, momenta)


def _adam(step: _Step) -> None:
    first, second = step.corrections()
    options, weights = step.options, step.weights
    late = torch.tensor(_LATE, device=weights[0].device)
    private_api.fused_adam_(
        weights,
        step.gradients,
        step.slots["momentum"],
        step.slots["velocity"],
        step.slots["velocity_hat"] if options.amsgrad else [],
        [late] * len(weights),
        lr=float(step.number(step.rate) * np.sqrt(second) / first),
        beta1=options.beta_1,
        beta2=options.beta_2,
        weight_decay=0.0,
        eps=options.epsilon,
        amsgrad=options.amsgrad,
        maximize=False,
    )


def _rmsprop(step: _Step) -> None:
    options, squares = step.options, step.slots["velocity"]
    private_api.foreach_mul_(squares, options.rho)
    private_api.foreach_addcmul_(squares, step.gradients, step.gradients, 1 - options.rho)
    scales = private_api.foreach_add(squares, options.epsilon)
    if options.centered:
        means = step.slots["average_gradient"]
        private_api.foreach_lerp_(means, step.gradients, 1 - options.rho)
        private_api.foreach_addcmul_(scales, means, means, -1)
    private_api.foreach_sqrt_(scales)
    if options.momentum > 0:
        momenta = step.slots["momentum"]
        private_api.foreach_mul_(momenta, options.momentum)
        private_api.foreach_addcdiv_(momenta, step.gradients, scales, step.rate)
        private_api.foreach_sub_(step.weights, momenta)
    else:
        private_api.foreach_addcdiv_(step.weights, step.gradients, scales, -step.rate)


def _adagrad(step: _Step) -> None:
    sums = step.slots["accumulator"]
    private_api.foreach_addcmul_(sums, step.gradients, step.gradients)
    scales = private_api.foreach_add(sums, step.options.epsilon)
    private_api.foreach_sqrt_(scales)
    private_api.foreach_addcdiv_(step.weights, step.gradients, scales, -step.rate)


def _lamb(step: _Step) -> None:
    options, (first, second) = step.options, step.corrections()
    means, squares = step.slots["momentum"], step.slots["velocity"]
    private_api.foreach_lerp_(means, step.gradients, 1 - options.beta_1)
    private_api.foreach_mul_(squares, options.beta_2)
    private_api.foreach_addcmul_(squares, step.gradients, step.gradients, 1 - options.beta_2)
    scales = private_api.foreach_div(squares, float(second))
    private_api.foreach_sqrt_(scales)
    private_api.foreach_add_(scales, options.epsilon)
    private_api.foreach_mul_(scales, float(first))
    directions = private_api.foreach_div(means, scales)
    lengths = torch.stack(step.norms(step.weights))
    others = torch.stack(step.norms(directions))
    ratios = torch.where((lengths > 0) & (others > 0), lengths / others, 1.0)
    private_api.foreach_mul_(directions, list((ratios * -step.rate).unbind()))
    private_api.foreach_add_(step.weights, directions)


_KERNELS: dict[str, Callable[[_Step], None]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "lamb": _lamb,
}
