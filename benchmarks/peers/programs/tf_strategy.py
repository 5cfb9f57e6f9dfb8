"""A loop over `strategy.run` by hand, under MirroredStrategy or MultiWorkerMirroredStrategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from benchmarks.peers import keras_models, tf_data
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.programs import tf_loops
from benchmarks.peers.programs.tf_devices import mirrored_strategy, use_threads
from benchmarks.peers.workloads import LOOPS, MOMENTUM


def main() -> None:
    job = Job.of_this_process()
    workers = job.options["workers"]
    use_threads(job, 1 if workers else job.replicas)
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if workers else mirrored_strategy(job.replicas)
    )
    clock = Clock(job)
    steps = tf_loops.training if job.workload in LOOPS else training
    step = steps(job, strategy)
    for inputs, targets in _batches(job, strategy):
        clock.step_done(step(inputs, targets))
    clock.write(int(os.environ.get("RANK", "0")))


def training(job: Job, strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """Step of a model with a loss and an optimizer, and an average of its weights where there is one."""
    with strategy.scope():
        model = keras_models.build(job.work)
        optimizer = keras.optimizers.SGD(job.work.rate, MOMENTUM)
        optimizer.build(model.trainable_variables)
        loss_function = keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
    weights = [variable.value for variable in model.trainable_variables]
    averages = [tf.Variable(tf.convert_to_tensor(weight)) for weight in weights]  # of this process

    def replica_step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loss_function(targets, model(inputs, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=job.work.global_batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if job.work.ema:
            for average, weight in zip(averages, weights, strict=True):
                average.assign_add((weight - average) * (1 - job.work.ema))
        return loss

    @tf.function
    def step(inputs: Any, targets: Any) -> Any:
        losses = strategy.experimental_local_results(
            strategy.run(replica_step, args=(inputs, targets))
        )
        return tf.add_n(losses) * (job.replicas / len(losses))  # this process's mean: no collective

    return step


def _batches(job: Job, strategy: tf.distribute.Strategy) -> Iterator[Any]:
    """Arguments of `strategy.run`, batch by batch."""
    if job.options["loader"]:
        yield from strategy.experimental_distribute_dataset(tf_data.dataset(job.work))
    elif job.options["workers"]:
        yield from map(_tensors, tf_data.in_memory(job.work, int(os.environ["RANK"]), job.replicas))
    else:
        yield from _mirrored(job, strategy)


def _mirrored(job: Job, strategy: tf.distribute.Strategy) -> Iterator[Any]:
    shares = [tf_data.in_memory(job.work, replica, job.replicas) for replica in range(job.replicas)]
    for parts in zip(*(map(_tensors, share) for share in shares), strict=True):
        yield tuple(
            strategy.experimental_distribute_values_from_function(
                lambda context, which=which, parts=parts: parts[context.replica_id_in_sync_group][
                    which
                ]
            )
            for which in (0, 1)
        )


def _tensors(arrays: Any) -> Any:
    return tuple(map(tf.constant, arrays))


main()
