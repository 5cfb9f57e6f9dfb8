"""How do I train on shards of WebDataset?

Give the `WebDataset` to `isotrain.sources.sample_stream`, and name the fields of its samples. With
`loader: {workers: 1}` the shards are read once per machine; WebDataset itself would refuse several processes.

    python examples/by_need/webdataset_shards.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import isotrain

SHARDS, SAMPLES, BATCH = 3, 64, 32


def model() -> Any:
    """A linear model."""
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])


def write_shards(folder: Path) -> None:
    """Writes random samples; yours are there already."""
    import webdataset

    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        file = folder / f"{os.getpid()}-{shard}.tar"
        with webdataset.TarWriter(str(file)) as writer:
            for number in range(SAMPLES):
                features = random.normal(size=8).astype("float32")
                fields = {"x.npy": features, "y.npy": features.sum(keepdims=True)}
                writer.write({"__key__": f"{shard}-{number:03}", **fields})
        file.rename(folder / f"{shard}.tar")  # at once: other processes write it too


def data() -> Any:
    """The samples of all shards, shuffled by a seed."""
    import webdataset

    folder = Path(tempfile.gettempdir()) / "isotrain-shards"
    folder.mkdir(exist_ok=True)
    if not (folder / f"{SHARDS - 1}.tar").exists():
        write_shards(folder)
    shards = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
    samples = webdataset.WebDataset(shards, shardshuffle=False).shuffle(50, seed=1).decode()
    return isotrain.sources.sample_stream(samples, "x.npy", "y.npy", samples=SHARDS * SAMPLES)


spec = isotrain.TrainingSpec(
    name="webdataset-shards",
    model=model,
    data=data,
    loader={"workers": 1},
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=BATCH,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
