"""A bar of one's own, drawn from the events of a run that is a plain loop's."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check_weights, load

import isotrain

EXAMPLE = "progress"


def plain(start: Plain) -> None:
    """torch's SGD."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.0625)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(start.model(inputs, training=True), targets).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program_and_shows_a_line_for_each_epoch(
    backend: str, replicas: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(EXAMPLE)
    result = isotrain.run(
        example.spec.replace(precision="float64", threads=1),
        backend=backend,
        replicas=replicas,
        output=tmp_path / "run",
        on_event=example.show,
    )
    bars = [line.split("]")[0] for line in capsys.readouterr().out.splitlines() if line[:1] == "["]
    assert bars == ["[###......", "[######...", "[#########"]
    check_weights(result.weights, EXAMPLE, plain)
