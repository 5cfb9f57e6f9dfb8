"""A run on several hosts that reads a stream in shards; each shard that a host opens is noted as a file."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import isotrain

SHARDS, LENGTH = 8, 10


def model() -> Any:
    """A layer of torch."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(4, 1).double()


def data(folder: str) -> Any:
    """Samples of shards of known lengths."""

    def shard(index: int, shards: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        (Path(folder) / f"{socket.gethostname()}-{index}").touch()
        inputs = np.random.default_rng(index).standard_normal((LENGTH, 4))
        yield from zip(inputs, inputs.sum(1, keepdims=True), strict=True)

    return isotrain.sources.sample_stream(shard, samples=[LENGTH] * SHARDS)


def spec(folder: str) -> dict[str, Any]:
    """Two epochs, with two processes on each host that read."""
    return {
        "model": {"torch": model},
        "data": data,
        "data_args": {"folder": folder},
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "precision": "float64",
        "global_batch_size": 16,
        "epochs": 2,
        "loader": {"workers": 2},
        "checkpoint": {},
        "threads": 1,
        "device": "cpu",
    }


def main(folder: str) -> None:
    """Trains as one of the ranks that were started from outside."""
    result = isotrain.run(
        spec(folder), backend="torch-ddp", output=f"{folder}/run", on_event=lambda event: None
    )
    if result is not None:
        facts = {"read": result.data_read, "loss": result.history.loss}
        Path(folder, "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
