"""The searches for a learning rate and for a batch size, against plain loops."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check_weights, load

import isotrain

FIRST, LAST, STEPS = 1e-3, 100.0, 24


@functools.cache
def plain_losses() -> list[float]:
    """Losses of a plain loop that raises the rate; it runs alone in a process of one replica."""
    spec = load("rate_finder").spec.replace(precision="float64", steps=STEPS, epochs=None)
    losses: list[float] = isotrain.launch(_raising, spec, backend="torch-ddp", on_event=_ignore)[0]
    return losses


def _ignore(event: Any) -> None: ...


def _raising(session: isotrain.Session) -> list[float]:
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
@cells("rate_finder")
def test_losses_of_the_rate_search_are_those_of_a_plain_loop(backend: str, replicas: int) -> None:
    spec = load("rate_finder").spec.replace(precision="float64")
    search = isotrain.find_rate(
        spec, backend=backend, replicas=replicas, first_rate=FIRST, last_rate=LAST, steps=STEPS
    )
    assert len(search.losses) > STEPS / 2
    expected = plain_losses()[: len(search.losses)]
    np.testing.assert_allclose(search.losses, expected, rtol=1e-6)


def plain(start: Plain) -> None:
    """torch's SGD on the batches that were found."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(start.model(inputs, training=True), targets).backward()
        optimizer.step()


@pytest.mark.examples
@cells("batch_finder")
def test_every_batch_up_to_the_data_fits(backend: str, replicas: int, tmp_path: Path) -> None:
    spec = load("batch_finder").spec.replace(precision="float64", threads=1)
    options: dict[str, Any] = {"backend": backend, "replicas": replicas}
    search = isotrain.find_batch(spec, **options)
    assert [trial.global_batch_size for trial in search.trials] == [32, 64, 96]
    assert search.largest == 96
    result = isotrain.run(
        spec.replace(global_batch_size=search.largest),
        output=tmp_path / "run",
        on_event=_ignore,
        **options,
    )
    check_weights(result.weights, "batch_finder", plain, global_batch_size=search.largest)
