"""Keras' own `fit`, under MirroredStrategy where there are several replicas."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.peers import keras_models, tf_data
from benchmarks.peers.job import Job, leave
from benchmarks.peers.programs.tf_devices import mirrored_strategy, use_threads
from benchmarks.peers.workloads import MOMENTUM


class FirstStep(keras.callbacks.Callback):
    """Callback that notes the end of the first step."""

    time = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.time = self.time or time.time()


class Seconds(keras.callbacks.Callback):
    """Callback that times whole epochs, and so calls nothing per step."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.start = self.job.now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.taken = self.job.now() - self.start


def main() -> None:
    """Trains in two calls: the steps that are not timed, and those that are, each as one epoch."""
    job = Job.of_this_process()
    use_threads(job, job.replicas)
    strategy = mirrored_strategy(job.replicas) if job.replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras_models.build(job.work)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(job.work.rate, MOMENTUM), loss)
    first, seconds = FirstStep(), Seconds(job)
    losses = [
        model.fit(**part, verbose=0, shuffle=False, callbacks=[callback]).history["loss"][0]
        for part, callback in zip(_parts(job), (first, seconds), strict=True)
    ]
    leave(job, 0, first_step=first.time, seconds=seconds.taken, losses=(losses[0], losses[1]))


def _parts(job: Job) -> list[dict[str, Any]]:
    """The data of the two calls."""
    work = job.work
    if job.options["loader"]:
        whole = tf_data.dataset(work)
        return [{"x": whole.take(work.first_steps)}, {"x": whole.skip(work.first_steps)}]
    inputs, targets = work.arrays()
    order = np.concatenate([work.order(epoch) for epoch in range(work.epochs)])
    border = work.first_steps * work.global_batch_size
    return [
        {"x": inputs[rows], "y": targets[rows], "batch_size": work.global_batch_size}
        for rows in (order[:border], order[border:])
    ]


main()
