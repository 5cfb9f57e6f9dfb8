"""A run that is killed in the middle of an epoch, and started again, against one that never was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from examples.by_need.harness import Plain, cells, check_weights, load

import isotrain

EXAMPLE = "exact_resume"
KILLED_AT = 4
"""Steps after which a process is killed: of 5 in an epoch, with a checkpoint after 3."""


def plain(start: Plain) -> None:
    """torch's SGD over all epochs."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125, momentum=0.5)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        outputs = start.model(inputs, training=True)
        torch.nn.functional.cross_entropy(outputs, targets.long()).backward()
        optimizer.step()


class Kill(isotrain.Callback):
    """Kills the first process on the way."""

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if session.steps_done == KILLED_AT and session.is_main:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    example, events = load(EXAMPLE), list[Any]()
    spec = example.spec.replace(precision="float64", threads=1)
    options: dict[str, Any] = {"backend": backend, "replicas": replicas, "on_event": events.append}
    with pytest.raises(isotrain.RunFailedError):
        example.train(spec.replace(callbacks=[Kill()]), tmp_path / "run", **options)
    resumed = example.train(spec, tmp_path / "run", **options)
    assert [event["done"] for event in events if event["event"] == "resumed"] == [3]
    check_weights(resumed.weights, EXAMPLE, plain)
