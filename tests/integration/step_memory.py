"""Models whose memory is planned, and what torch's allocator sees of a step."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

import isotrain

BATCH = 64


def dense() -> Any:
    return torch.nn.Sequential(
        *(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)),
        *(torch.nn.GELU(), torch.nn.Linear(512, 10)),
    )


def convolutional() -> Any:
    return torch.nn.Sequential(
        *(torch.nn.Unflatten(1, (1, 8, 8)), torch.nn.Conv2d(1, 32, 3, padding=1)),
        *(torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, padding=1)),
        *(torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 64, 10)),
    )


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = torch.nn.Linear(8, 64)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
            for _ in range(4)
        )
        self.head = torch.nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.widen(inputs.reshape(-1, 8, 8))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def portable() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def cuttable() -> Any:
    import keras

    layers = [keras.layers.Dense(512, activation="relu"), keras.layers.Dense(512)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(4 * BATCH, 64)).astype("float32"), np.arange(4 * BATCH) % 10


def spec(model: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "global_batch_size": BATCH,
        "epochs": 2,
        "threads": 1,
        **fields,
    }


SPECS: dict[str, dict[str, Any]] = {
    "dense": spec({"torch": dense}),
    "convolutional": spec({"torch": convolutional}),
    "transformer": spec({"torch": Transformer}),
    "recomputed": spec({"torch": Transformer}, recompute=["blocks.*"]),
    "accumulated": spec({"torch": dense}, gradient_accumulation_steps=4),
    "portable": spec(portable),
}


def allocated(session: isotrain.Session) -> int:
    """Largest number of bytes at a time that the eighth step allocates."""
    batches = session.batches()
    for _ in range(7):
        session.step(next(batches))
    batch = next(batches)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        session.step(batch)
    events = profile.profiler.kineto_results.events()
    sizes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    return int(np.cumsum([size for _, size in sorted(sizes)]).max())


SPLIT = {
    "pipeline": {**SPECS["dense"], "strategy": "pipeline", "gradient_accumulation_steps": 4},
    "tensor": spec(cuttable, strategy="tensor"),
}
"""Specs of replicas of two processes."""


def kept(session: isotrain.Session) -> int:
    """Number of bytes of the tensors that live after the third step: state, gradients and batches."""
    batches = session.batches()
    for _ in range(3):
        session.step(next(batches))
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
