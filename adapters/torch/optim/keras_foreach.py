"""Updates of Keras' optimizers by torch's foreach and fused kernels, over all weights at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import torch

from isotrain.adapters.common.adam_variants import (
    nadam_momentum,
    nadam_momentum_product,
    radam_rectification,
)
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.optim.lion import lion_signs
from isotrain.adapters.torch.optim.muon import is_orthogonalized, muon_direction
from isotrain.plugin import CustomOptimizer, TrainingSpec

_SCALAR_TYPES: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}
Norms = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Function that returns the L2 norm of each tensor, scalars."""
_LATE_STEP = 1e9
"""Step at which torch's bias correction is 1; Keras' correction is part of the rate."""
_WHOLE_VECTORS = 64
"""Multiple of the elements that one instruction of any CPU computes."""


@dataclass(eq=False, slots=True)
class _Step:
    """Operands of one update.

    Attributes:
        options: Object whose attributes are the options, such as the Keras optimizer.
        weights: Weights, any shapes; updated in place.
        gradients: Clipped gradients, one per weight, in its shape.
        slots: Slot variables by kind, one per weight; updated in place.
        number: NumPy scalar type in which Keras computes rates.
        rate: Learning rate of this update.
        count: Number of this update, from 1 on.
        norms: Norms of tensors that are sharded as the weights are.
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
        """Adam's bias corrections: `1 - beta_1**count` and `1 - beta_2**count`, in Keras' scalar type."""
        step = self.number(self.count)
        first, second = self.number(self.options.beta_1), self.number(self.options.beta_2)
        return 1 - first**step, 1 - second**step


@dataclass(frozen=True)
class _Group:
    """Weights that are updated with equal options.

    Attributes:
        options: Object whose attributes are the options, such as the Keras optimizer.
        lr_factor: What the learning rate is multiplied by.
        rate: Function that returns the learning rate of an update; None for that of the step.
        indices: Indices of the weights.
        weights: The weights, any shapes.
        slots: Slot variables by kind, one per weight.
    """

    options: Any
    lr_factor: float
    rate: Callable[[], float] | None
    indices: Sequence[int]
    weights: list[torch.Tensor]
    slots: dict[str, list[torch.Tensor]]


class KerasUpdate:
    """Updates weights and slot variables of a Keras optimizer, as its `apply` does."""

    def __init__(
        self,
        spec: TrainingSpec,
        optimizer: Any,
        weights: list[torch.Tensor],
        norms: Norms = private_api.foreach_norm,
        groups: Sequence[keras_private.OptionGroup] = (),
    ) -> None:
        """Refers to the optimizer's slot variables.

        Args:
            spec: Training spec with the optimizer.
            optimizer: Keras optimizer that is built on the weights.
            weights: Weights of one dtype, any shapes.
            norms: Norms of tensors that are sharded as the weights are.
            groups: Groups of the weights with options of their own; without any, all have the optimizer's.
        """
        kernel = _KERNELS[spec.optimizer.name]
        is_fused = kernel is _adam and spec.reproducible is not None
        self._kernel = _adam_by_whole_vectors if is_fused else kernel
        self._options = optimizer
        self._norms = norms
        self._groups = [
            _group(optimizer, each, weights)
            for each in groups
            or [keras_private.OptionGroup(frozenset(range(len(weights))), 1.0, {})]
        ]
        self._number = _SCALAR_TYPES[weights[0].dtype]
        self._iterations = optimizer.iterations.value
        self._count: int | None = None
        self.rate = float(optimizer.learning_rate.value)

    def forget(self) -> None:
        """Reads the number of updates from the optimizer again, in which it was overwritten."""
        self._count = None

    def __call__(
        self, gradients: list[torch.Tensor], global_norm: torch.Tensor | None = None
    ) -> None:
        """Updates all weights in place by gradients of their shapes, which stay as they are.

        Args:
            gradients: One per weight.
            global_norm: Their norm, a scalar, where it is known and they are clipped by it.
        """
        if self._count is None:
            self._count = int(self._iterations)
        self._count += 1
        contiguous = [gradient.contiguous() for gradient in gradients]
        clipped_gradients = clipped(contiguous, self._options, self._norms, global_norm)
        for group in self._groups:
            self._update(group, [clipped_gradients[index] for index in group.indices], self._count)
        self._iterations.add_(1)

    def _update(self, group: _Group, gradients: list[torch.Tensor], count: int) -> None:
        """Updates the weights of a group by clipped gradients of their shapes."""
        base = self.rate if group.rate is None else group.rate()
        rate = self._number(base) * self._number(group.lr_factor)
        decay = group.options.weight_decay
        if decay:
            private_api.foreach_mul_(group.weights, float(1 - self._number(decay) * rate))
        self._kernel(
            _Step(
                group.options,
                group.weights,
                gradients,
                group.slots,
                self._number,
                float(rate),
                count,
                self._norms,
            )
        )


class _Options:
    """Options of a group, as attributes: its own, else those that the optimizer has at present."""

    def __init__(self, optimizer: Any, options: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        vars(self).update(options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _group(
    optimizer: Any, group: keras_private.OptionGroup, weights: Sequence[torch.Tensor]
) -> _Group:
    """A group with its weights and their slot variables, of any shapes."""
    indices = sorted(group.indices)
    options = _Options(optimizer, group.options) if group.options else optimizer
    slots = {
        kind: [variables[index].value for index in indices]
        for kind, variables in keras_private.slots_of(optimizer).items()
    }
    members = [weights[index] for index in indices]
    return _Group(options, group.lr_factor, group.rate, indices, members, slots)


def keras_update(
    spec: TrainingSpec,
    optimizer: Any,
    variables: Sequence[Any],
    norms: Norms = private_api.foreach_norm,
    groups: Sequence[keras_private.OptionGroup] = (),
) -> KerasUpdate | None:
    """Update by torch's kernels for a spec's optimizer; None if only Keras' own `apply` can do it.

    That is the case for custom optimizers, loss scaling, weights with constraints, several dtypes, and
    non-contiguous weights.

    Args:
        spec: Training spec with the optimizer.
        optimizer: Keras optimizer that is built on the variables.
        variables: Keras variables to update.
        norms: Norms of tensors that are sharded as the variables' values are.
        groups: Groups of the variables with options of their own.
    """
    weights = [variable.value for variable in variables]
    if isinstance(spec.optimizer, CustomOptimizer) or not weights:
        return None
    has_loss_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    has_constraints = any(variable.constraint is not None for variable in variables)
    dtypes = {weight.dtype for weight in weights}
    are_contiguous = all(weight.is_contiguous() for weight in weights)
    if has_loss_scale or has_constraints or not are_contiguous:
        return None
    if len(dtypes) > 1 or not dtypes <= set(_SCALAR_TYPES):
        return None
    return KerasUpdate(spec, optimizer, weights, norms, groups)


def clipped(
    gradients: list[torch.Tensor],
    options: Any,
    norms: Norms,
    norm_of_all: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients clipped as Keras does: each by its norm, all by their global norm, or by value.

    Args:
        gradients: Contiguous tensors of any shapes.
        options: Keras optimizer with `clipnorm`, `global_clipnorm` and `clipvalue`; at most one is set.
        norms: Norms of tensors that are sharded as the gradients are.
        norm_of_all: Their global norm, a scalar; computed here if it is None and needed.
    """
    if options.clipnorm:
        gradient_norms = torch.stack(norms(gradients))
        factors = options.clipnorm / gradient_norms.clamp(min=options.clipnorm)
        return list(private_api.foreach_mul(gradients, list(factors.unbind())))
    if options.global_clipnorm:
        norm = global_norm(gradients, norms) if norm_of_all is None else norm_of_all
        return clipped_by(norm, gradients, options.global_clipnorm)
    if options.clipvalue:
        bounded = private_api.foreach_clamp_max(gradients, options.clipvalue)
        return list(private_api.foreach_clamp_min(bounded, -options.clipvalue))
    return gradients


def global_norm(
    gradients: Sequence[torch.Tensor], norms: Norms = private_api.foreach_norm
) -> torch.Tensor:
    """L2 norm, a scalar, of contiguous gradients of any shapes together, by the norms of each."""
    return torch.linalg.vector_norm(torch.stack(norms(list(gradients))))


def clipped_by(norm: torch.Tensor, gradients: list[Any], bound: float) -> list[Any]:
    """Gradients clipped by their global norm (a scalar tensor), as Keras does."""
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
    late_step = torch.tensor(_LATE_STEP, device=weights[0].device)
    private_api.fused_adam_(
        weights,
        step.gradients,
        step.slots["momentum"],
        step.slots["velocity"],
        step.slots["velocity_hat"] if options.amsgrad else [],
        [late_step] * len(weights),
        lr=float(step.number(step.rate) * np.sqrt(second) / first),
        beta1=options.beta_1,
        beta2=options.beta_2,
        weight_decay=0.0,
        eps=options.epsilon,
        amsgrad=options.amsgrad,
        maximize=False,
    )


def _adam_by_whole_vectors(step: _Step) -> None:
    """As `_adam`, with bits that do not depend on where in a tensor an element is.

    torch's fused kernel computes the elements that fill no vector of the CPU by other instructions, which
    round otherwise. Here these elements of all weights are put together, padded, and computed once more.
    """
    operands = {"weights": step.weights, "gradients": step.gradients, **step.slots}
    ends = {kind: _ends(group) for kind, group in operands.items()}
    sizes = [each.numel() for each in ends["weights"]]
    if not sizes:
        _adam(step)
        return
    padding = step.weights[0].new_zeros(-sum(sizes) % _WHOLE_VECTORS)
    joined = {kind: [torch.cat([*group, padding])] for kind, group in ends.items()}
    _adam(step)
    weights, gradients = joined.pop("weights"), joined.pop("gradients")
    _adam(replace(step, weights=weights, gradients=gradients, slots=joined))
    for kind, (vector,) in {"weights": weights, **joined}.items():
        private_api.foreach_copy_(ends[kind], list(vector.split([*sizes, len(padding)])[:-1]))


def _ends(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Vectors of the last elements of tensors, which fill no vector of the CPU: views of these tensors."""
    ends = []
    for tensor in tensors:
        size = tensor.numel()
        if rest := size % _WHOLE_VECTORS:
            is_end = size == rest and tensor.dim() == 1  # itself: a view takes microseconds
            ends.append(tensor if is_end else tensor.view(-1)[-rest:])
    return ends


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


def _update_moments(step: _Step) -> None:
    options, squares = step.options, step.slots["velocity"]
    private_api.foreach_lerp_(step.slots["momentum"], step.gradients, 1 - options.beta_1)
    private_api.foreach_mul_(squares, options.beta_2)
    private_api.foreach_addcmul_(squares, step.gradients, step.gradients, 1 - options.beta_2)


def _lamb(step: _Step) -> None:
    options, (first, second) = step.options, step.corrections()
    _update_moments(step)
    means, squares = step.slots["momentum"], step.slots["velocity"]
    scales = private_api.foreach_div(squares, float(second))
    private_api.foreach_sqrt_(scales)
    private_api.foreach_add_(scales, options.epsilon)
    private_api.foreach_mul_(scales, float(first))
    directions = private_api.foreach_div(means, scales)
    weight_norms = torch.stack(step.norms(step.weights))
    direction_norms = torch.stack(step.norms(directions))
    is_defined = (weight_norms > 0) & (direction_norms > 0)
    ratios = torch.where(is_defined, weight_norms / direction_norms, 1.0)
    private_api.foreach_mul_(directions, list((ratios * -step.rate).unbind()))
    private_api.foreach_add_(step.weights, directions)


def _lion(step: _Step) -> None:
    options, momenta = step.options, step.slots["momentum"]
    signs = lion_signs(momenta, step.gradients, options.beta_1)
    private_api.foreach_add_(step.weights, signs, alpha=-step.rate)
    private_api.foreach_mul_(momenta, options.beta_2)
    private_api.foreach_add_(momenta, step.gradients, alpha=1 - options.beta_2)


def _muon(step: _Step) -> None:
    options, others = step.options, []
    for index, weight in enumerate(step.weights):
        if is_orthogonalized(weight, options.orthogonalize):
            mean, gradient = step.slots["momentum"][index], step.gradients[index]
            direction = muon_direction(mean, gradient, options.momentum, options.nesterov)
            weight.sub_(direction, alpha=step.rate)
        else:
            others.append(index)
    if others:
        slots = {kind: [each[index] for index in others] for kind, each in step.slots.items()}
        weights = [step.weights[index] for index in others]
        gradients = [step.gradients[index] for index in others]
        _adamw(replace(step, weights=weights, gradients=gradients, slots=slots))


def _adamw(step: _Step) -> None:
    first, second = step.corrections()
    _update_moments(step)
    scales = private_api.foreach_div(step.slots["velocity"], float(second))
    private_api.foreach_sqrt_(scales)
    private_api.foreach_add_(scales, step.options.epsilon)
    rate = step.rate / float(first)
    private_api.foreach_addcdiv_(step.weights, step.slots["momentum"], scales, -rate)


def _nadam(step: _Step) -> None:
    _update_moments(step)
    beta_1, count = step.options.beta_1, step.count
    product = nadam_momentum_product(beta_1, count)
    momentum, next_momentum = (nadam_momentum(beta_1, each) for each in (count, count + 1))
    directions = private_api.foreach_mul(
        step.slots["momentum"], next_momentum / (1 - product * next_momentum)
    )
    private_api.foreach_add_(directions, step.gradients, alpha=(1 - momentum) / (1 - product))
    scales = private_api.foreach_div(step.slots["velocity"], float(step.corrections()[1]))
    private_api.foreach_sqrt_(scales)
    private_api.foreach_add_(scales, step.options.epsilon)
    private_api.foreach_addcdiv_(step.weights, directions, scales, -step.rate)


def _radam(step: _Step) -> None:
    _update_moments(step)
    means, (first, second) = step.slots["momentum"], step.corrections()
    rate = step.rate / float(first)
    rectification = radam_rectification(step.options.beta_2, step.count)
    if rectification is None:
        private_api.foreach_add_(step.weights, means, alpha=-rate)
        return
    scales = private_api.foreach_add(step.slots["velocity"], 0.0)
    private_api.foreach_sqrt_(scales)
    private_api.foreach_add_(scales, step.options.epsilon)
    factor = rate * rectification * math.sqrt(float(second))
    private_api.foreach_addcdiv_(step.weights, means, scales, -factor)


_KERNELS: dict[str, Callable[[_Step], None]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "lamb": _lamb,
    "lion": _lion,
    "muon": _muon,
    "nadam": _nadam,
    "radam": _radam,
}
