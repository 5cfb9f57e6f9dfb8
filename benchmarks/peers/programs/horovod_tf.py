"""Horovod with TensorFlow by hand."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from benchmarks.peers import keras_models, tf_data
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.programs.tf_devices import use_threads
from benchmarks.peers.workloads import MOMENTUM


def main() -> None:
    job = Job.of_this_process()
    hvd.init()
    use_threads(job)
    model = keras_models.build(job.work)
    optimizer = keras.optimizers.SGD(job.work.rate, MOMENTUM)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)

    @tf.function
    def step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(targets, model(inputs, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    clock = Clock(job)
    if job.options["loader"]:
        batches = iter(tf_data.local_dataset(job.work, hvd.rank(), hvd.size()))
    else:
        batches = map(_tensors, tf_data.in_memory(job.work, hvd.rank(), hvd.size()))
    for inputs, targets in batches:
        clock.step_done(step(inputs, targets))
    clock.write(hvd.rank())
    hvd.shutdown()


def _tensors(arrays: Any) -> Any:
    return tuple(map(tf.constant, arrays))


main()
