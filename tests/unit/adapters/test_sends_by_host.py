"""Point-to-point transfers of tensors that Gloo cannot send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from isotrain.adapters.torch.comm import process_group


@pytest.mark.parametrize(
    ("backend", "device", "by_host"),
    [("gloo", "cpu", False), ("gloo", "cuda", True), ("nccl", "cuda", False)],
)
def test_gloo_sends_tensors_of_a_gpu_from_the_host(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, by_host: bool
) -> None:
    """Gloo would write from the address of device memory: "writev: Bad address" on an H200."""

    def get_backend(*_: Any) -> str:
        return backend

    monkeypatch.setattr(dist, "get_backend", get_backend)
    assert process_group.sends_by_host(torch.device(device)) is by_host
