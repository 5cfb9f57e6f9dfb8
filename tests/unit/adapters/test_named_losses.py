"""Means of named losses: exact counts of samples, whatever the dtype of the losses."""

from __future__ import annotations

import pytest
import torch

from isotrain.adapters.common.objective import Objective
from isotrain.adapters.torch.metrics.named_losses import NamedLosses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_samples_are_counted_in_float64(dtype: torch.dtype) -> None:
    objective = Objective(None, None, ("price", "kind"))
    metric = NamedLosses(objective, torch.device("cpu"))
    for value, count, weight in ((1.0, 257, 1025.0), (0.0, 1, 1.0)):
        mean = torch.tensor(value, dtype=dtype)
        objective.latest = [(mean, None), (mean, torch.tensor(weight))]
        metric.update(None, None, count)
    assert metric.named_results() == {"price": 257 / 258, "kind": 1025 / 1026}
