"""Comparison of a replayed step with an eager one: loss, predictions, gradients, state and generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from isotrain.adapters.torch.base import gpu
from isotrain.adapters.torch.base.pytree import filled, leaves
from isotrain.adapters.torch.metrics.base import MeasuredPredictions


def perturbed(tree: Any) -> Any:
    """Pytree of tensors, each floating-point element changed by a factor of 1 + eps or 1 - eps, at random."""
    generator = torch.Generator().manual_seed(0)
    return filled(tree, (_perturb(part, generator) for part in leaves(tree)))


@contextmanager
def perturbed_weights(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Perturbs weights, of any shape, within it by `.data`.

    Tensors that were saved for a backward pass so stay valid.
    """
    original = [weight.data for weight in weights]
    for weight, data in zip(weights, perturbed(original), strict=True):
        weight.data = data
    try:
        yield
    finally:
        for weight, data in zip(weights, original, strict=True):
            weight.data = data


def _perturb(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Floating-point tensor of any shape with each element changed by one unit of rounding, at random."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs.to(tensor))


_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}
"""Relative tolerance of a tensor's norm, by dtype."""
_LOW_PRECISION_TOLERANCE = 3e-2
"""Relative tolerance for other dtypes, such as bfloat16."""
_SHARED_NORM = 1e-2
"""Part of the norm of all gradients that is added to each one's: some gradients are nothing but rounding."""
_NOISE_FACTOR = 16
"""Allowed difference, in multiples of the one that perturbed inputs and weights cause."""
METRICS_DIFFER = "metrics differ from those of a step by Keras"
Computation = Callable[[Any, Any], tuple[torch.Tensor, Any]]
"""Function from inputs and targets to loss and predictions."""


class Snapshot:
    """Copy of tensors, of any shape, and of the states of torch's random generators, to restore them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._values = [tensor.detach().clone() for tensor in tensors]
        self._devices = [gpu.CPU, *gpu.holding(tensors)]
        self._rng_states = self.rng_states()

    def rng_states(self) -> list[torch.Tensor]:
        """Current states of the generators, uint8 vectors: the CPU's, then one per GPU."""
        return [gpu.rng_state(device) for device in self._devices]

    def restore(self) -> None:
        """Restores tensors and generators."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value)
        for device, state in zip(self._devices, self._rng_states, strict=True):
            gpu.set_rng_state(state, device)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results and effects of one call of a computation.

    Attributes:
        loss: Loss, a scalar, or shape `[2, losses + 1]`: means and denominators.
        predictions: Tensors of the predictions, any shape.
        gradients: Gradients of the loss, one per parameter that requires gradients; None for parameters
            without one.
        variables: Non-trainable variables after the call.
        rng_states: States of the random generators after the call, uint8 vectors.
        wrong_metrics: Names of captured metrics whose increments differ from Keras'.
    """

    loss: torch.Tensor
    predictions: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    variables: list[torch.Tensor]
    rng_states: list[torch.Tensor]
    wrong_metrics: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        compute: Computation,
        batch: tuple[Any, Any],
        parameters: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        wrong_metrics: Callable[[Any, MeasuredPredictions], Sequence[str]],
    ) -> Outcome:
        """Calls a computation (shapes of the loss: see `LossModule`); restores the state that it changed.

        Args:
            compute: Computation to call.
            batch: Inputs and targets, pytrees of tensors.
            parameters: Parameters whose gradients are computed, if the loss requires gradients.
            others: Variables that it may change.
            wrong_metrics: Function that returns the names of metrics whose increments differ from Keras'.
        """
        snapshot = Snapshot(others)
        loss, predictions = compute(*batch)
        wrong_names: Sequence[str] = ()
        if isinstance(predictions, MeasuredPredictions):
            wrong_names, predictions = wrong_metrics(batch[1], predictions), predictions.predictions
        gradients: list[torch.Tensor | None] = []
        if loss.requires_grad:
            total = loss[0].sum() if loss.dim() else loss  # the second row has the denominators
            trained = [each for each in parameters if each.requires_grad]
            gradients = list(torch.autograd.grad(total, trained, allow_unused=True))
        outcome = cls(
            loss.detach(),
            [part.detach() for part in leaves(predictions)],
            gradients,
            [tensor.detach().clone() for tensor in others],
            snapshot.rng_states(),
            wrong_names,
        )
        snapshot.restore()
        return outcome

    def difference(self, other: Outcome, exact: bool, rounded: Outcome | None = None) -> str | None:
        """First difference between this outcome and another one, as text; None if they agree.

        It is `METRICS_DIFFER` if they agree in all else.

        Args:
            other: Outcome for the same batch, from the same state.
            exact: Whether they must agree to the bit.
            rounded: Outcome of this computation with perturbed inputs and weights, which tells how far
                rounding grows. None if the fixed tolerance is enough.
        """
        if not all(map(torch.equal, self.rng_states, other.rng_states)):
            return "it draws other random numbers"
        other_parts = other.parts
        rounded_parts = {} if rounded is None else rounded.parts
        for name, tensors in self.parts.items():
            noise = _noise(tensors, rounded_parts.get(name, tensors))
            if not agree(tensors, other_parts[name], exact, noise):
                verb = "differs from that" if name == "the loss" else "differ from those"
                return f"{name} {verb} of a step by Keras"
        return METRICS_DIFFER if other.wrong_metrics else None

    @property
    def parts(self) -> dict[str, Sequence[torch.Tensor | None]]:
        """Tensors to compare, any shapes, by the name that messages give them."""
        return {
            "the loss": [self.loss],
            "the predictions": self.predictions,
            "the moving statistics": self.variables,
            "the gradients": self.gradients,
        }


class Verifier:
    """Comparison of computations with that of a Keras model, without effects on its state.

    Attributes:
        is_exact: Whether the same operations give the same bits each time: on GPUs some do not.
    """

    def __init__(
        self,
        compute: Computation,
        parameters: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        wrong_metrics: Callable[[Any, MeasuredPredictions], Sequence[str]],
    ) -> None:
        """Takes the computation that others are compared with.

        Args:
            compute: Keras' computation.
            parameters: Parameters of the model, any shapes.
            others: Variables that computations may change, any shapes.
            wrong_metrics: Function that returns the names of metrics whose increments differ from Keras'.
        """
        self._compute = compute
        self._parameters = parameters
        self._others = others
        self._wrong_metrics = wrong_metrics
        self.is_exact = all(parameter.device.type == "cpu" for parameter in parameters)

    def expected(self, inputs: Any, targets: Any) -> Outcome:
        """Outcome of Keras' computation on inputs and targets, pytrees of tensors."""
        return self.outcome(self._compute, inputs, targets)

    def outcome(self, compute: Computation, inputs: Any, targets: Any) -> Outcome:
        """Outcome of a computation on inputs and targets, pytrees of tensors."""
        return Outcome.of(
            compute, (inputs, targets), self._parameters, self._others, self._wrong_metrics
        )

    def difference(
        self, expected: Outcome, replayed: Outcome, batch: tuple[Any, Any], exact: bool
    ) -> str | None:
        """First difference from Keras' outcome, or None. Computes how far rounding grows only if needed."""
        difference = expected.difference(replayed, exact)
        if difference is None or exact:
            return difference
        inputs, targets = batch
        with perturbed_weights(self._parameters):
            rounded = self.outcome(self._compute, perturbed(inputs), targets)
        return expected.difference(replayed, exact, rounded)


def _noise(
    expected: Sequence[torch.Tensor | None], rounded: Sequence[torch.Tensor | None]
) -> list[float]:
    """Allowed difference of each tensor, of any shape, for rounding, beyond the fixed tolerance."""
    distances = [_distance(a, b) for a, b in zip(expected, rounded, strict=True)]
    shared = _SHARED_NORM * sum(distances)
    return [_NOISE_FACTOR * (distance + shared) for distance in distances]


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Euclidean distance of two floating-point tensors of one shape; 0 for others, which do not round."""
    if a is None or b is None or a is b or not a.is_floating_point():
        return 0.0
    return _norm(a - b)


def agree(
    expected: Sequence[torch.Tensor | None],
    actual: Sequence[torch.Tensor | None],
    exact: bool,
    noise: Sequence[float],
) -> bool:
    """Whether tensors are equal, to the bit or up to rounding.

    Args:
        expected: Tensors of any shape and dtype.
        actual: Tensors to compare with them.
        exact: Whether they must be equal to the bit.
        noise: Allowed difference of each tensor beyond the fixed tolerance, if not exact.
    """
    if len(expected) != len(actual):
        return False
    shared = _SHARED_NORM * sum(map(_norm, expected))
    pairs = zip(expected, actual, noise, strict=True)
    return all(_is_near(a, b, exact, shared, allowed) for a, b, allowed in pairs)


def _norm(tensor: torch.Tensor | None) -> float:
    """Euclidean norm, in float64, without NaN and infinities; 0 for None and for integers."""
    if tensor is None or not tensor.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(tensor.nan_to_num(0, 0, 0), dtype=torch.float64))


def _is_near(
    expected: torch.Tensor | None,
    actual: torch.Tensor | None,
    exact: bool,
    shared_norm: float,
    noise: float,
) -> bool:
    """Whether two tensors are equal in shape and dtype, and equal or near in value."""
    if expected is None or actual is None:
        return expected is actual
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return False
    is_equal = (expected == actual) | (expected.isnan() & actual.isnan())
    if bool(is_equal.all()):
        return True
    if exact or not expected.is_floating_point():
        return False
    difference = torch.where(is_equal, 0, expected - actual)
    tolerance = _TOLERANCE.get(expected.dtype, _LOW_PRECISION_TOLERANCE)
    bound = tolerance * (_norm(expected) + shared_norm) + noise
    return bool(difference.isfinite().all()) and _norm(difference) <= bound
