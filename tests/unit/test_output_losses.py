"""The loss of each output of a native torch model is given beside the metrics, and computed once."""

from __future__ import annotations

import torch

from isotrain.adapters.torch.native_loss import NativeLoss
from isotrain.adapters.torch.output_loss import output_losses
from isotrain.core.spec.files import load_spec

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
    "global_batch": 1,
    "steps": 1,
}


def slice_of(size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Targets and predictions."""
    targets = {"near": torch.zeros(size), "far": torch.zeros(size)}
    return targets, {"near": torch.full((size,), 2.0), "far": torch.full((size,), float(size))}


def test_it_is_computed_once_and_never_taken_for_that_of_another_slice() -> None:
    CALLS.clear()
    loss = NativeLoss(load_spec(SPEC))
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
    near, far = (metric.readings() for metric in measured)
    assert near == {"near_loss": 2.0}
    assert far == {"far_loss": (4 * 4 + 2 * 2 + 6 * 6) / 12}
