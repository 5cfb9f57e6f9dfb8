"""L-BFGS against the same in a plain loop."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain

EXAMPLE = "lbfgs"
pytestmark = pytest.mark.examples


def plain(start: Plain) -> None:
    """torch's L-BFGS with a closure."""
    import torch

    optimizer = start.example.lbfgs(start.model.parameters(), 1.0)

    def closure(inputs: Any, targets: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(start.model(inputs), targets)
        loss.backward()
        return loss

    for batch in start.batches:
        optimizer.step(functools.partial(closure, *batch))


@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    """Each iteration divides by differences of gradients, which makes rounding errors larger."""
    check(EXAMPLE, plain, backend, replicas, tmp_path, tolerance=1e-9)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    spec = load(EXAMPLE).spec.replace(checkpoint={"every_steps": 1, "keep_last": 9}, threads=1)
    whole = isotrain.run(spec, backend="torch-ddp", replicas=1, output=tmp_path / "whole")
    weights = {name: np.array(weight) for name, weight in whole.weights.items()}
    part = isotrain.run(
        spec.replace(steps=2), backend="torch-ddp", replicas=1, output=tmp_path / "part"
    )
    resumed = isotrain.resume(part.run_directory, spec=spec)
    for name, weight in weights.items():
        np.testing.assert_array_equal(resumed.weights[name], weight)


def test_metrics_count_each_sample_once_and_nothing_is_lost(tmp_path: Path) -> None:
    """Each step has all samples, so that the metric of an epoch is the loss before its step."""
    events: list[Any] = []
    spec = load(EXAMPLE).spec.replace(
        metrics=["mean_squared_error"], checkpoint={"every_steps": 2}, threads=1
    )
    part = isotrain.run(
        spec.replace(steps=2), backend="torch-ddp", replicas=2, output=tmp_path / "run"
    )
    isotrain.resume(part.run_directory, spec=spec, on_event=events.append)
    history = isotrain.read_result(part.run_directory).history
    measured = [epoch["mean_squared_error"] for epoch in history.epochs]
    assert measured == pytest.approx(history.loss, rel=1e-5)
    (resumed,) = [event for event in events if event["event"] == "resumed"]
    assert resumed["lost"] == []


def test_other_strategies_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(
        isotrain.RunFailedError, match=r"before its first step.*\s.*its step needs a closure"
    ):
        isotrain.run(
            load(EXAMPLE).spec.replace(strategy="local-sgd"),
            backend="torch-ddp",
            replicas=2,
            output=tmp_path / "run",
        )
