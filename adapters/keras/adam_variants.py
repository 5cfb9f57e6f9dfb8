"""NAdam, RAdam and Muon as Keras optimizers: Keras lacks RAdam, and has others of the same names.

Its Nadam has another momentum schedule, and its Muon another scale of AdamW's part.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from isotrain.adapters.common.adam_variants import (
    DECAY,
    DECAY_RATE,
    LEAST_LENGTH,
    PRODUCT_STEPS,
    largest_length,
)
from isotrain.adapters.common.muon import orthogonalized


class _AdamVariant(keras.optimizers.Adam):
    """Adam with another update of the weights by its two moments.

    Numbers meet tensors in operators: Keras' functions pass them through float32 on TensorFlow.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a weight, any shape, and its moments."""
        gradient = ops.cast(gradient, variable.dtype)
        index = self._get_variable_index(variable)
        mean, square = self._momentums[index], self._velocities[index]
        self.assign_add(mean, ops.subtract(gradient, mean) * (1 - self.beta_1))
        self.assign_add(square, ops.subtract(gradient * gradient, square) * (1 - self.beta_2))
        step = ops.cast(self.iterations + 1, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * self._direction(gradient, mean, square, step))

    def _direction(self, gradient: Any, mean: Any, square: Any, step: Any) -> Any:
        """Direction to subtract from a weight, times the rate; in the shape of the weight.

        Args:
            gradient: Gradient, in the shape of the weight.
            mean: Mean of the gradients, as above.
            square: Mean of the squared gradients, as above.
            step: Number of the step, from 1 on, a scalar.
        """
        raise NotImplementedError


class Nadam(_AdamVariant):
    """NAdam (Dozat 2016, algorithm 2)."""

    def _direction(self, gradient: Any, mean: Any, square: Any, step: Any) -> Any:
        dtype = step.dtype
        first_steps = ops.arange(1, PRODUCT_STEPS + 1, dtype=dtype)
        momenta = self._momentum(first_steps)
        product = ops.prod(ops.where(first_steps <= step, momenta, ops.ones_like(momenta)))
        momentum, next_momentum = self._momentum(step), self._momentum(step + 1)
        look_ahead = mean * next_momentum / (1 - product * next_momentum)
        look_ahead = look_ahead + gradient * ((1 - momentum) / (1 - product))
        corrected = square / (1 - ops.power(ops.cast(self.beta_2, dtype), step))
        return look_ahead / (ops.sqrt(corrected) + self.epsilon)

    def _momentum(self, step: Any) -> Any:
        return self.beta_1 * (1 - 0.5 * ops.exp(step * (DECAY_RATE * math.log(DECAY))))


class Radam(_AdamVariant):
    """RAdam (Liu et al. 2020, algorithm 2)."""

    def _direction(self, gradient: Any, mean: Any, square: Any, step: Any) -> Any:
        corrected = mean / (1 - ops.power(ops.cast(self.beta_1, step.dtype), step))
        end = largest_length(self.beta_2)
        if end <= LEAST_LENGTH:
            return corrected
        remaining = -ops.expm1(step * math.log(self.beta_2))
        length = end - 2 * step * (1 - remaining) / remaining
        is_adaptive = length > LEAST_LENGTH
        safe = ops.where(is_adaptive, length, ops.full_like(length, end))
        rectification = ops.sqrt((safe - 4) * (safe - 2) * end / ((end - 4) * (end - 2) * safe))
        adaptive = rectification * ops.sqrt(remaining) / (ops.sqrt(square) + self.epsilon)
        return corrected * ops.where(is_adaptive, adaptive, ops.ones_like(adaptive))


class Muon(_AdamVariant):
    """Muon for matrices (Jordan et al. 2024), AdamW for all other weights."""

    def __init__(
        self,
        *args: Any,
        momentum: float = 0.95,
        nesterov: bool = True,
        orthogonalize: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.momentum, self.nesterov, self.orthogonalize = momentum, nesterov, orthogonalize

    def get_config(self) -> dict[str, Any]:
        names = ("momentum", "nesterov", "orthogonalize")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if len(variable.shape) != 2 or not self.orthogonalize:
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = ops.cast(gradient, variable.dtype)
        mean = self._momentums[self._get_variable_index(variable)]
        self.assign_add(mean, ops.subtract(gradient, mean) * (1 - self.momentum))
        mean = ops.convert_to_tensor(mean)
        ahead = gradient + (mean - gradient) * self.momentum if self.nesterov else mean
        direction = orthogonalized(ahead, ops.transpose, lambda x: ops.sqrt(ops.sum(x * x)))
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * direction)

    def _direction(self, gradient: Any, mean: Any, square: Any, step: Any) -> Any:
        first, second = (ops.cast(each, step.dtype) for each in (self.beta_1, self.beta_2))
        corrected = square / (1 - ops.power(second, step))
        return mean / (1 - ops.power(first, step)) / (ops.sqrt(corrected) + self.epsilon)
