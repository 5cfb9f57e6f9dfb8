"""A session on GPUs whose calls are recorded."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers.recorded_gpus import keep_tensors_on_cpu, recorded_gpus

import isotrain


class Samples:
    """Map-style data, which is read in a thread."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.ones(3, "float32"), index % 2


SPEC: dict[str, Any] = {
    "model": {"torch": lambda: torch.nn.Linear(3, 2)},
    "data": Samples,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "global_batch_size": 4,
    "epochs": 1,
}


def recorded_session(_: isotrain.Session) -> dict[str, Any]:
    """Calls of another session, which this process opens on the first of two GPUs.

    Returns:
        `first`: the first call; `copies`: those until the first step, and whether they were made `in_thread`;
        `waits`: how often the host waited for the GPU.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorded = recorded_gpus(monkeypatch, 2)
        keep_tensors_on_cpu(monkeypatch, recorded)
        spec = {**SPEC, "device": "gpu"}
        with isotrain.open_session(spec, backend="torch-ddp", replicas=1) as session:
            built = len(recorded.calls)
            batches = session.batches()
            batch = next(batches)
            assert recorded.wait_for(2 * 3, "end of device")
            copied = slice(built, built + 4 * 2 * 3)
            copies, threads = recorded.calls[copied], recorded.threads[copied]
            session.step(batch)
            for each in batches:
                session.step(each)
        return {
            "first": _text(recorded.calls[0]),
            "copies": list(map(_text, copies)),
            "in_thread": threading.get_ident() not in threads,
            "waits": [name for name, *_ in recorded.calls].count("synchronize"),
        }


def _text(call: tuple[Any, ...]) -> str:
    return " ".join(map(str, call))
