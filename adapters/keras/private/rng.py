"""Keras' random numbers: initializers, seed generators, torch generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import draw_seed

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.keras.private.misc import patched_attribute

_DEFAULT_GENERATOR = "global_seed_generator"
"""Name of Keras' global seed generator, for which older versions have no constant."""
_SEED_STATE = "seed_generator_state"


@contextlib.contextmanager
def replaced_initializer_draws(draws: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Context in which initializers draw by replaced functions.

    Args:
        draws: Functions by name (`normal`, `uniform`, `truncated_normal`) that take Keras' function and
            return its replacement.
    """
    with contextlib.ExitStack() as stack:
        for name, make_draw in draws.items():
            original = getattr(backend.random, name)
            stack.enter_context(patched_attribute(backend.random, name, make_draw(original)))
        yield


def _probe_initializer_draws() -> None:
    def ones(original: Any) -> Any:
        return lambda shape, *args, **options: keras.ops.ones(shape)

    makers = {
        "normal": keras.initializers.RandomNormal,
        "uniform": keras.initializers.RandomUniform,
        "truncated_normal": keras.initializers.TruncatedNormal,
    }
    with replaced_initializer_draws(dict.fromkeys(makers, ones)):
        for name, maker in makers.items():
            drawn = keras.ops.convert_to_numpy(maker(seed=1)((2,)))
            require(bool((drawn == 1).all()), f"initializers draw with backend.random.{name}")


def replace_random_function(
    name: str, make_draw: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replaces a function by which random layers and `keras.random` draw, for good.

    Args:
        name: Name of the function, such as `uniform`.
        make_draw: Takes Keras' function and returns its replacement.
    """
    setattr(backend.random, name, make_draw(getattr(backend.random, name)))


def _probe_replace_random_function() -> None:
    original = backend.random.uniform
    replace_random_function("uniform", lambda _: lambda shape, **options: keras.ops.ones(shape))
    try:
        drawn = keras.ops.convert_to_numpy(keras.random.uniform((2,)))
    finally:
        backend.random.uniform = original
    require(bool((drawn == 1).all()), "keras.random draws with backend.random")


@contextlib.contextmanager
def shifted_seeds(moved: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which random layers draw with `moved(seed)`; generators' states advance as usual."""
    original = keras.random.SeedGenerator.next

    def drawn(generator: keras.random.SeedGenerator, ordered: bool = True) -> Any:
        return moved(original(generator, ordered))

    with patched_attribute(keras.random.SeedGenerator, "next", drawn):
        yield


def _probe_shifted_seeds() -> None:
    def draw(shift: int) -> np.ndarray:
        with shifted_seeds(lambda seed: seed + shift):
            drawn = keras.random.uniform((4,), seed=keras.random.SeedGenerator(1))
        return np.asarray(keras.ops.convert_to_numpy(drawn))

    require(bool((draw(0) == draw(0)).all()), "the same numbers from the same seed")
    require(bool((draw(0) != draw(1)).any()), "other numbers from a moved seed")


def set_default_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Sets this thread's global seed generator, which Keras draws from when no seed is passed."""
    global_state.set_global_attribute(_DEFAULT_GENERATOR, generator)


def _probe_default_generator() -> None:
    before = global_state.get_global_attribute(_DEFAULT_GENERATOR)
    generator = keras.random.SeedGenerator(5)
    set_default_generator(generator)
    keras.random.uniform((1,))
    set_default_generator(before)
    state = keras.ops.convert_to_numpy(generator.state.value)
    require(state.tolist() != [5, 0], "a draw without a seed moves the global generator")


def seeded_generators(made: Callable[[Any, Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which random operations on torch draw from generators made by a function.

    Args:
        made: Takes the two elements of a drawn seed (scalar integer tensors) and returns a `torch.Generator`.
    """
    return patched_attribute(
        backend.random, "torch_seed_generator", lambda seed: made(*draw_seed(seed))
    )


def _probe_seeded_generators() -> None:
    if keras.backend.backend() != "torch":
        return
    import torch

    seeds = []

    def made(first: Any, second: Any) -> Any:
        seeds.append((int(first), int(second)))
        return torch.Generator(first.device).manual_seed(int(first + second) & 0xFFFFFFFF)

    source = keras.random.SeedGenerator(5)
    with seeded_generators(made):
        drawn = keras.random.uniform((4,), seed=source)
    source.state.assign([5, 0])
    require(seeds == [(5, 0)], "a generator is made of the seed (5, 0)")
    require(bool((keras.random.uniform((4,), seed=source) == drawn).all()), "equal numbers of it")


def is_seed(name: str) -> bool:
    """Whether a variable path is that of a seed generator's state, `(seed, draws so far)`."""
    return name.endswith(_SEED_STATE)


def _probe_is_seed() -> None:
    generator = keras.random.SeedGenerator(5)
    state = keras.ops.convert_to_numpy(generator.state.value)
    require(is_seed(generator.state.path), f"a state whose path ends in {_SEED_STATE}")
    require(state.tolist() == [5, 0], "(seed, draws so far)")


PROBES = (
    PrivateApiProbe("backend.random", _probe_initializer_draws),
    PrivateApiProbe("backend.random.uniform", _probe_replace_random_function),
    PrivateApiProbe("SeedGenerator.next", _probe_shifted_seeds),
    PrivateApiProbe("random.seed_generator.global_seed_generator", _probe_default_generator),
    PrivateApiProbe("backend.torch.random.torch_seed_generator", _probe_seeded_generators),
    PrivateApiProbe("SeedGenerator.state", _probe_is_seed),
)
