"""Keras' random functions, by sample: layers and `keras.random` draw the same on every framework.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from isotrain.adapters.common.sample_draws import BITS, REFUSAL, PassDraws, active
from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import SpecError, active_draws

_WITHIN_TWO = math.erf(math.sqrt(2.0))
"""Probability that a standard normal number is between -2 and 2."""


@functools.cache
def draw_by_sample() -> None:
    """Lets Keras' random functions draw by sample in passes of a run, unless their seed is a number."""
    by_sample = (_normal, _uniform, _truncated_normal, _randint, _categorical, _dropout)
    for function in by_sample:
        name = function.__name__.removeprefix("_")
        keras_private.replace_random_function(name, functools.partial(_replaced, function))
    for name in ("shuffle", "gamma", "binomial", "beta"):
        refuse = functools.partial(_refuse, f"keras.random.{name}")
        keras_private.replace_random_function(name, functools.partial(_replaced, refuse))


def _replaced(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Keras that another one replaces in passes that draw by sample."""

    @functools.wraps(original)
    def draw(*args: Any, seed: Any = None, **options: Any) -> Any:
        draws = active_draws.get()
        if isinstance(draws, PassDraws) and not isinstance(seed, int):
            return function(draws, *args, **options)
        with active(None):
            return original(*args, seed=seed, **options)

    return draw


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise SpecError(REFUSAL.format(name))


def _normal(
    draws: PassDraws, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None
) -> Any:
    return mean + stddev * draws.normal(_sizes(shape), dtype or keras.config.floatx())


def _uniform(
    draws: PassDraws, shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None
) -> Any:
    return minval + (maxval - minval) * draws.uniform(_sizes(shape), dtype or keras.config.floatx())


def _truncated_normal(
    draws: PassDraws, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None
) -> Any:
    """Normal numbers within two standard deviations, by the inverse of the distribution function."""
    unit = draws.uniform(_sizes(shape), dtype or keras.config.floatx())
    return mean + stddev * math.sqrt(2.0) * ops.erfinv((2 * unit - 1) * _WITHIN_TWO)


def _randint(draws: PassDraws, shape: Any, minval: Any, maxval: Any, dtype: Any = "int32") -> Any:
    integers = draws.cast(draws.integers(_sizes(shape)), "int64")
    return draws.cast(minval + integers * (maxval - minval) // 2**BITS, dtype)


def _categorical(draws: PassDraws, logits: Any, num_samples: int, dtype: Any = "int32") -> Any:
    """Samples from logits `[batch, classes]` by the maximum of logits and Gumbel noise."""
    logits = ops.convert_to_tensor(logits)
    rows, classes = draws.shape_of(logits)
    wide = "float64" if "float64" in str(logits.dtype) else "float32"
    unit = draws.uniform((rows, num_samples, classes), wide)
    scores = draws.cast(logits, wide)[:, None] - ops.log(-ops.log(unit))
    return draws.cast(ops.argmax(scores, -1), dtype)


def _dropout(draws: PassDraws, inputs: Any, rate: float, noise_shape: Any = None) -> Any:
    if rate == 0:
        return inputs
    sizes = draws.shape_of(inputs)
    if noise_shape is not None:
        sizes = [
            size if each is None else each
            for size, each in zip(sizes, _sizes(noise_shape), strict=True)
        ]
    if rate == 1:
        return ops.zeros_like(inputs)
    return inputs * (draws.bernoulli(sizes, 1 - rate, inputs.dtype) * (1 / (1 - rate)))


def _sizes(shape: Any) -> Sequence[Any]:
    """The sizes of a shape, which may be a tensor."""
    return list(ops.unstack(shape)) if ops.is_tensor(shape) else shape
