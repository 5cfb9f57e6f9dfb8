"""Initial weights of portable models: determined by model and seed, equal on every framework.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import contextlib
import functools
import random as python_random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from isotrain.adapters.keras import private as keras_private


@contextlib.contextmanager
def seeded_initial_weights(seed: int) -> Iterator[None]:
    """Context in which Keras' initializers draw the same numbers on every framework.

    Initializers take their seeds from Python's `random`, seeded here, and their draws from NumPy's PCG64
    (float64, then cast to the weight's dtype) in place of the framework's generator.
    """
    draws = {"normal": _normal, "uniform": _uniform, "truncated_normal": _truncated_normal}
    state = python_random.getstate()
    python_random.seed(seed)
    by_numpy = {name: functools.partial(_drawn_by_numpy, draw) for name, draw in draws.items()}
    try:
        with keras_private.replaced_initializer_draws(by_numpy):
            yield
    finally:
        python_random.setstate(state)


def _drawn_by_numpy(draw: Callable[..., np.ndarray], original: Callable[..., Any]) -> Any:
    """Keras random function that draws arrays of a shape by NumPy's PCG64 where the seed is a number."""

    def function(
        shape: Sequence[int], *args: Any, dtype: Any = None, seed: Any = None, **options: Any
    ) -> Any:
        if not isinstance(seed, int):
            return original(shape, *args, dtype=dtype, seed=seed, **options)
        generator = np.random.Generator(np.random.PCG64(seed & 0xFFFFFFFF))
        values = draw(generator, tuple(shape), *args, **options)
        return keras.ops.convert_to_tensor(values, dtype=dtype or keras.config.floatx())

    return function


def _normal(
    generator: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, stddev: float = 1.0
) -> np.ndarray:
    """Normal float64 numbers of a shape."""
    return mean + stddev * generator.standard_normal(shape)


def _uniform(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    minval: float = 0.0,
    maxval: float = 1.0,
) -> np.ndarray:
    """Uniform float64 numbers in [minval, maxval), of a shape."""
    return minval + (maxval - minval) * generator.random(shape)


def _truncated_normal(
    generator: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, stddev: float = 1.0
) -> np.ndarray:
    """Float64 draws within two standard deviations of the mean, by rejection sampling."""
    values = np.asarray(generator.standard_normal(shape))
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return mean + stddev * values
