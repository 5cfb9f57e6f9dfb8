"""A data-parallel run by hand under MultiWorkerMirroredStrategy, started by `benchmarks.sharded`."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.sharded_work import BATCH, RATE, REPLICAS, STEPS, inputs, portable_model, timed


def main(target: Path) -> None:
    """Writes this process's seconds of a step into a file of its own."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = portable_model()
        optimizer = keras.optimizers.Adam(RATE)
        optimizer.build(model.trainable_variables)

    def replica_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch, training=True) - batch) ** 2) / REPLICAS
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.run(replica_step, args=(batch,))

    batches = tf.split(tf.constant(inputs()[rank::REPLICAS]), 8 * [BATCH // REPLICAS])
    seconds = timed(functools.partial(step, batches[n % 8]) for n in range(STEPS))
    (target / str(rank)).write_text(str(seconds), encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
