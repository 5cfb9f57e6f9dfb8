"""How do I train on a stream without an end, and read it once per machine, not once for each of its GPUs?

Set `loader: {workers: 1}`: a process of its own reads the stream, and passes each replica its samples. This
stream is endless, and `epoch_steps` says what counts as an epoch.

    python examples/by_need/stream_per_machine.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

import isotrain

BATCH, EPOCH_STEPS, EPOCHS = 32, 4, 2


def model() -> Any:
    """A linear model."""
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])


def records() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of 20 records without an end; imagine that they are downloaded and decoded here."""
    for number in count():
        features = np.random.default_rng(number).normal(size=(20, 8)).astype("float32")
        yield features, features.sum(axis=1, keepdims=True)


spec = isotrain.TrainingSpec(
    name="stream-per-machine",
    model=model,
    data=records,
    loader={"workers": 1},
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=BATCH,
    epoch_steps=EPOCH_STEPS,
    epochs=EPOCHS,
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print("read by each machine:", result.data_read)
