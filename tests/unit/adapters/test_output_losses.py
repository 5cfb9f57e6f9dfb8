"""Losses of each output and counts of native torch models."""

from __future__ import annotations

import pytest
import torch

from isotrain.adapters.torch.loss.total import TotalLoss
from isotrain.adapters.torch.metrics.confusion import ConfusionMetric
from isotrain.adapters.torch.metrics.registry import output_losses
from isotrain.core.errors import SpecError
from isotrain.core.spec.loading import load_spec

CALLS: list[int] = []


def absolute(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    CALLS.append(len(output))
    return (output - target).abs()


SPEC = {
    "model": {"torch": dict},
    "data": dict,
    "loss": {"near": absolute, "far": absolute},
    "loss_weights": {"near": 1.0, "far": 3.0},
    "optimizer": {"name": "sgd", "lr": 0.5},
    "global_batch_size": 1,
    "steps": 1,
}


def slice_of(size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Targets and predictions."""
    targets = {"near": torch.zeros(size), "far": torch.zeros(size)}
    return targets, {"near": torch.full((size,), 2.0), "far": torch.full((size,), float(size))}


def test_an_output_loss_is_computed_once_per_slice() -> None:
    CALLS.clear()
    loss = TotalLoss(load_spec(SPEC))
    measured = output_losses(loss, torch.device("cpu"))
    for size in (4, 2):
        targets, predictions = slice_of(size)
        assert float(loss(targets, predictions)) == 2.0 + 3.0 * size
        for metric in measured:
            metric.update(targets, predictions, size)
    assert CALLS == [4, 4, 2, 2]
    for metric in measured:
        metric.update(*slice_of(6), 6)
    assert CALLS[4:] == [6, 6]
    near, far = (metric.named_results() for metric in measured)
    assert near == {"near_loss": 2.0}
    assert far == {"far_loss": (4 * 4 + 2 * 2 + 6 * 6) / 12}


def test_a_class_is_chosen_only_where_there_are_classes() -> None:
    chosen = ConfusionMetric(
        lambda *counts: counts[0], "precision", torch.device("cpu"), [0.5], class_id=0
    )
    with pytest.raises(
        SpecError, match=r"choose among classes .* the predictions have shape \[3\]"
    ):
        chosen.update(torch.ones(3), torch.ones(3), 3)
