"""Strategy diloco on gradients that are the same in every step: exact outer steps and rounding errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import isotrain

RATE = 0.125
INPUTS = np.random.default_rng(3).normal(size=(8, 5))
CHANGE = RATE * INPUTS.mean(0)
"""How far a step moves the weights, whatever they are."""


def model() -> Any:
    from torch import nn

    return nn.Linear(5, 1, bias=False)


def linear(model: Any, batch: Any) -> Any:
    return model(batch[0])[:, 0]


def data() -> Any:
    return INPUTS, np.zeros(8)


def moved(steps: int, **options: Any) -> np.ndarray:
    """How far so many steps have moved the weights, shape `[5]`."""
    spec = {
        "model": {"torch": model},
        "data": data,
        "objective": linear,
        "optimizer": {"name": "sgd", "lr": RATE},
        "global_batch_size": 8,
        "steps": steps,
        "precision": "float64",
        "strategy": {"name": "diloco", "options": options},
        "threads": 1,
    }
    with isotrain.open_session(spec, backend="torch-ddp", replicas=1) as session:
        before = session.read_state(("trainable",))["weight"].copy()
        for batch in session.batches():
            session.step(batch)
        return np.asarray(before - session.read_state(("trainable",))["weight"])[0]


@pytest.mark.slow
def test_the_outer_optimizer_begins_after_the_synchronous_steps() -> None:
    """Two steps before it count in full, the two of its own by its rate."""
    found = moved(4, every=2, start=2, outer_rate=0.5, outer_momentum=0)
    np.testing.assert_allclose(found, (2 + 0.5 * 2) * CHANGE, rtol=1e-12)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_rounding_leaves_is_sent_later(bits: int) -> None:
    """After 40 outer steps as much is missing as one rounding leaves, not 40 of them."""
    found = moved(40, every=1, outer_rate=1.0, outer_momentum=0, bits=bits)
    half_a_digit = 0.5 / (2 ** (bits - 1) - 1)
    largest = 2 * np.abs(CHANGE).max()  # with what was left before
    assert np.abs(found - 40 * CHANGE).max() <= half_a_digit * largest
    assert np.abs(found - 40 * CHANGE).max() > 1e-12
