"""Copies of batches to a GPU. The calls of torch are recorded, for there is no GPU here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup


def test_batches_are_pinned_on_the_replicas_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts on GPU 0; pinned there, each rank would take memory of that GPU."""
    calls: list[Any] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        calls.append(("device", device))
        yield
        calls.append("end")

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pin_memory")
        return tensor

    def copied(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        calls.append(("to", device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    group = object.__new__(TorchReplicaGroup)
    group._is_cpu, group._device = False, torch.device("cuda", 2)
    group.to_device(np.ones(3))
    device = group._device
    assert calls == [("device", device), "pin_memory", ("to", device, True), "end"]
