"""Ranges of the elements of torch's weights that are of several dtypes, or not laid out row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isotrain.adapters.torch.comm.base import SingleReplicaCommunicator
from isotrain.adapters.torch.replica.replica import TorchReplica


def replica() -> tuple[TorchReplica, list[torch.Tensor]]:
    """A replica of three weights with 24 elements, the second not contiguous, the last of another dtype."""
    weights = [
        torch.arange(4.0),
        torch.arange(4.0, 20).reshape(1, 4, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(20.0, 24).bfloat16(),
    ]
    named = dict(zip("abc", weights, strict=True))
    trainer: Any = SimpleNamespace(trainable=named, part=lambda name: list(named.values()))
    return TorchReplica(trainer, SingleReplicaCommunicator()), weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 24), (1, 3), (2, 7), (5, 9), (4, 20), (18, 22), (24, 24), (3, 3)]
)
def test_a_range_is_read_and_written(start: int, stop: int) -> None:
    found, weights = replica()
    layouts = [each.stride() for each in weights]
    before = torch.arange(24.0)
    part = found.read_range(start, stop)
    assert part.dtype == torch.float32
    torch.testing.assert_close(part, before[start:stop], rtol=0, atol=0)
    found.write_range(start, part + 100)
    before[start:stop] += 100
    torch.testing.assert_close(found.read(("trainable",)), before, rtol=0, atol=0)
    assert [each.stride() for each in weights] == layouts
    assert weights[2].dtype == torch.bfloat16
