"""Memory that a step of torch has freed stays with the process, for the next one."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated

import isotrain

FLOATS = 4 * 2**20
TENSORS, ROUNDS = 5, 10


def model() -> Any:
    import torch

    return torch.nn.Linear(2, 1)


def page_faults(session: isotrain.Session) -> int:
    """Page faults of rounds in which tensors are allocated, filled and freed, without the first rounds."""
    import torch

    def faults_of(rounds: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(rounds):
            tensors = [torch.ones(FLOATS) for _ in range(TENSORS)]
            del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults_of(3)
    return faults_of(ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("is_set_by_user", [False, True])
def test_freed_memory_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set_by_user: bool
) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if is_set_by_user:
        monkeypatch.setenv("MALLOC_TOP_PAD_", "131072")
    inputs = np.zeros((4, 2), np.float32)
    spec = {
        "model": {"torch": model},
        "data": (inputs, inputs[:, :1]),
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch_size": 4,
        "epochs": 1,
        "device": "cpu",
    }
    faults = run_isolated(page_faults, spec, "torch-ddp", tmp_path / "run")
    few = 4 * ROUNDS * TENSORS  # each tensor has 4,096 pages, or 8 of the largest kind
    assert (faults > few) if is_set_by_user else (faults < few)
