"""Gradients that a torch stage sends stay as they are while they are sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isotrain.adapters.torch.pipeline.modules import PipelineModules
from isotrain.adapters.torch.pipeline.stage import PipelineContext, StageSeeds, TorchStageWork
from isotrain.core.data.batch import Slice
from isotrain.core.pipeline.partition import PipelineSplit
from isotrain.core.pipeline.schedules import Pass


class Shifted(nn.Module):
    """Adds a weight to each sample, both by views: gradients of one sample are one tensor for both."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.view(-1, 2, 3) + self.shift.view(1, 2, 3)).square().flatten(1)


@pytest.mark.parametrize("samples", [1, 2])
def test_what_is_sent_is_not_changed_by_the_next_backward_pass(samples: int) -> None:
    torch.manual_seed(0)
    last = Shifted()
    program: Any = SimpleNamespace(
        model=nn.Sequential(nn.Linear(4, 6), last),
        with_autocast=lambda function: function,
        loss_of=lambda targets, predictions: predictions.mean(),
    )
    modules = PipelineModules(program, PipelineSplit(2, ("1",)))
    communicator: Any = None  # passes send nothing themselves
    context = PipelineContext(modules, communicator, modules, [last.shift], [], StageSeeds(()))
    inputs = torch.randn(3, samples, 4)
    work = TorchStageWork(
        context, [Slice(each, None, samples, 1 / 3) for each in inputs], lambda *_: None
    )
    activations = torch.randn(3, samples, 6)
    sent = []
    for index, received in enumerate(activations):
        work.forward(Pass("forward", 1, index), [received])
        sent += work.backward(Pass("backward", 1, index), [])
    expected = 2 * (activations + last.shift.detach()) / (3 * 6 * samples)
    torch.testing.assert_close(torch.stack(sent), expected)
    torch.testing.assert_close(last.shift.grad, expected.sum((0, 1)))
