"""How do I read a stream that shards itself, such as WebDataset or MosaicML Streaming?

Give an object with the methods of `isotrain.sources.ShardedStream`: each replica reads its own files. The
stream then decides the order, which may depend on the number of replicas. Here it does not.

    python examples/by_need/sharded_stream.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import isotrain

BATCH, FILES, ROWS = 32, 6, 32


def model() -> Any:
    """A linear model."""
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])


class Files:
    """Files of one global batch each, of which each replica reads its rows."""

    def __len__(self) -> int:
        return FILES

    def iterate(self, *, epoch: int, seed: int, replica: int, replicas: int) -> Iterator[Any]:
        """Yields this replica's rows of each file, in an order of files that every epoch draws anew."""
        for number in np.random.default_rng([seed, epoch]).permutation(FILES):
            features = np.random.default_rng(number).normal(size=(ROWS, 8)).astype("float32")
            rows = features[replica * ROWS // replicas : (replica + 1) * ROWS // replicas]
            yield rows, rows.sum(axis=1, keepdims=True)


spec = isotrain.TrainingSpec(
    name="sharded-stream",
    model=model,
    data=isotrain.DataSet(Files()),
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=BATCH,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
