"""Work and timing of the programs about sharded and pipeline runs; isotrain is not imported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.statistics import Estimate, median

WIDTH, LAYERS, BATCH, REPLICAS = 1024, 6, 128, 2
WARM, TIMED = 5, 20
STEPS = WARM + TIMED
RATE = 0.001
GOAL = 1.03
"""The time of a step beside that by hand, at most."""


def model() -> Any:
    """Wide layers of torch: exchanging them takes as long as computing with them."""
    from torch import nn

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def portable_model() -> Any:
    """The like of Keras."""
    import keras

    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def inputs() -> np.ndarray:
    """Noise, float32, of eight global batches `[samples, features]`; it is also the targets."""
    return np.random.default_rng(0).standard_normal((8 * BATCH, WIDTH), "float32")


def timed(steps: Iterator[Callable[[], Any]]) -> float:
    """Seconds of a step, of those after the first few."""
    for _ in range(WARM):
        next(steps)()
    began = time.perf_counter()
    for _ in range(TIMED):
        next(steps)()
    return (time.perf_counter() - began) / TIMED


def judged(ratio: Estimate) -> str:
    """A ratio to the time by hand, and whether it is within the goal, as far as its interval tells."""
    verdict = "reached" if ratio.value <= GOAL else "missed" if ratio.low > GOAL else "open"
    return f"{ratio.text(' x')}, goal {GOAL}: {verdict}"


def lines(
    seconds: dict[str, list[float]], reference: str, held_to: tuple[str, ...] = ()
) -> Iterator[str]:
    """A line for each way: milliseconds a step, and the ratio to a reference within each round.

    Args:
        seconds: Seconds of each round, by way.
        reference: Way to which the others are compared.
        held_to: The ways that are held to the goal.
    """
    for name, found in seconds.items():
        ratio = median(np.array(found) / np.array(seconds[reference]))
        told = judged(ratio) if name in held_to else ratio.text(" x")
        yield f"{name:34} {median(1e3 * np.array(found)).text(' ms', 1):28} {told}"
