"""How do I train a diffusion model (DDPM), and sample from its moving average?

The loop draws noise and times by step and sample, and gives noisy samples and the noise to `session.batch`.
Afterwards `session.call` within `session.averaged()` samples.

    python examples/by_need/diffusion.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

STEPS, SAMPLES, TIMES = 8, 12, 10
KEPT = np.cumprod(1 - np.linspace(0.01, 0.3, TIMES))
"""Fraction of the signal's variance that is left at each time."""


def model() -> Any:
    """The noise in a noisy point of the plane, given the time."""
    import keras

    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)]
    )


def noisy_samples(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy points of a circle with their times, shape `[samples, 3]`, and the noise, `[samples, 2]`."""
    random = np.random.default_rng(step)
    angles = random.uniform(0, 2 * np.pi, SAMPLES)
    points = np.stack([np.cos(angles), np.sin(angles)], 1)
    times, noise = random.integers(TIMES, size=SAMPLES), random.normal(size=points.shape)
    kept = KEPT[times, None]
    return np.hstack(
        [kept**0.5 * points + (1 - kept) ** 0.5 * noise, times[:, None] / TIMES]
    ), noise


def sample(session: isotrain.Session, count: int) -> np.ndarray:
    """Points, shape `[count, 2]`, by the reverse process (Ho et al. 2020). Local."""
    random = np.random.default_rng(0)
    points = random.normal(size=(count, 2))
    for time in reversed(range(TIMES)):
        kept, before = KEPT[time], KEPT[time - 1] if time else 1.0
        noise = session.call(np.hstack([points, np.full((count, 1), time / TIMES)]))
        points = (points - (1 - kept / before) / (1 - kept) ** 0.5 * noise) / (kept / before) ** 0.5
        points += (time > 0) * (1 - kept / before) ** 0.5 * random.normal(size=points.shape)
    return points


def train(session: isotrain.Session) -> list[Any]:
    """Trains on this process's part of the samples; returns points that the average has made."""
    while not session.is_done:
        noisy, noise = map(session.local_rows, noisy_samples(session.steps_done))
        session.step(session.batch(noisy, noise))
    with session.averaged():
        return list(sample(session, 4))


spec = isotrain.TrainingSpec(
    name="diffusion",
    model=model,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.125},
    ema={"decay": 0.875, "start": 2},
    global_batch_size=SAMPLES,
    steps=STEPS,
)

if __name__ == "__main__":
    print(isotrain.launch(train, spec, backend="torch-ddp", replicas=2)[0])
