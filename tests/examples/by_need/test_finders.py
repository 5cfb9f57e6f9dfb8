"""The searches for a learning rate and for a batch size, of which the rate's losses are compared."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import BACKENDS, load

import isotrain

FIRST, LAST, STEPS = 1e-3, 100.0, 24


@functools.cache
def plain_losses() -> list[float]:
    """Losses of a plain loop that raises the rate; it runs alone in a process of one replica."""
    spec = load("rate_finder").spec.replace(precision="float64", steps=STEPS, epochs=None)
    losses: list[float] = isotrain.launch(_plain, spec, backend="torch-ddp", on_event=_ignore)[0]
    return losses


def _ignore(event: Any) -> None: ...


def _plain(session: isotrain.Session) -> list[float]:
    import torch

    model = session.group.model
    weights = [variable.value for variable in model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=FIRST)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(
        optimizer, gamma=(LAST / FIRST) ** (1 / (STEPS - 1))
    )
    losses = []
    for batch in session.batches():
        (part,) = batch.slices[0]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(part.inputs, training=True), part.targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss))
    return losses


@pytest.mark.examples
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_of_the_rate_search_are_those_of_a_plain_loop(backend: str, replicas: int) -> None:
    spec = load("rate_finder").spec.replace(precision="float64")
    search = isotrain.find_rate(
        spec, backend=backend, replicas=replicas, first_rate=FIRST, last_rate=LAST, steps=STEPS
    )
    assert len(search.losses) > STEPS / 2
    expected = plain_losses()[: len(search.losses)]
    np.testing.assert_allclose(search.losses, expected, rtol=1e-6)


@pytest.mark.examples
def test_every_batch_up_to_the_data_fits() -> None:
    search = isotrain.find_batch(load("batch_finder").spec, backend="torch-ddp", replicas=2)
    assert [trial.global_batch_size for trial in search.trials] == [32, 64, 96]
    assert search.largest == 96
