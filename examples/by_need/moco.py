"""How do I train with momentum contrast (MoCo): a slow encoder of keys, and a queue of past keys?

`ema` is the encoder of keys. The queue is state of the model: the keys of all replicas enter it in each step.
Give each replica a sample in each step: one without samples keeps its state, and so its old queue.

    python examples/by_need/moco.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

STEPS, BATCH, LENGTH, QUEUE, TEMPERATURE = 8, 12, 4, 32, 0.25


def model() -> Any:
    """An encoder of 8 features into embeddings, which holds the queue of keys."""
    import keras

    class Queue(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            normal = keras.initializers.RandomNormal(stddev=0.5, seed=1)
            self.keys = self.add_weight((QUEUE, LENGTH), normal, trainable=False, name="keys")
            super().build(shape)

        def call(self, inputs: Any) -> Any:
            return inputs

    encoder = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(LENGTH)]
    return keras.Sequential(
        [keras.Input((8,)), *encoder, keras.layers.UnitNormalization(), Queue(name="queue")]
    )


def views(step: int) -> np.ndarray:
    """Two noisy views of the samples of a step, shape `[2, samples, features]`."""
    random = np.random.default_rng(step)
    samples = random.normal(size=(BATCH, 8))
    return samples + 0.125 * random.normal(size=(2, BATCH, 8))


def info_nce(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Loss per sample: cross-entropy of its key among those of the queue (He et al., arXiv 1911.05722)."""
    from keras import ops

    first, keys = batch
    queries, queue = model(first), model.get_layer("queue").keys
    negatives = ops.matmul(queries, ops.transpose(queue))
    logits = ops.concatenate([ops.sum(queries * keys, -1, keepdims=True), negatives], -1)
    if step.is_training:
        all_keys, _ = step.all_gather(keys)
        queue.assign(ops.concatenate([all_keys, queue])[:QUEUE])
    return -ops.log_softmax(logits / TEMPERATURE)[:, 0]


def train(session: isotrain.Session) -> None:
    """Encodes the second views by the average of the weights, and takes a step on the first ones."""
    while not session.is_done:
        first, second = map(session.local_rows, views(session.steps_done))
        with session.averaged():
            keys = session.call(second)
        session.step(session.batch(first, keys))
        session.save_if_due()


spec = isotrain.TrainingSpec(
    name="moco",
    model=model,
    objective=info_nce,
    optimizer={"name": "sgd", "lr": 0.125},
    ema=0.875,
    per_replica="*queue/keys",
    global_batch_size=BATCH,
    steps=STEPS,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
