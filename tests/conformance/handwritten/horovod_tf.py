"""Horovod's grouped all-reduce with a Keras model on TensorFlow, by hand."""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf
from conformance import cases
from conformance.handwritten.common import (
    JOB,
    RANK,
    gather,
    global_batches,
    keras_optimizer,
    keras_weights,
    load_keras,
    local_batch,
    save,
)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(int(JOB["tensorflow_threads"]))
    hvd.init()
    model = cases.portable_model()
    load_keras(model)
    optimizer = keras_optimizer()
    optimizer.build(model.trainable_variables)
    variables = model.trainable_variables
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)

    @tf.function(autograph=False)
    def step(inputs: cases.Arrays, targets: cases.Arrays, weight: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cases.both_losses(model(inputs, training=True), targets) * weight
        gradients = tape.gradient(loss, [v.value for v in variables])
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        *means, loss = hvd.grouped_allreduce([*dense, loss], op=hvd.Average)
        optimizer.apply(means, variables)
        return loss

    inputs, targets = cases.training_data()
    for rows in global_batches():
        own, weight = local_batch(rows, RANK)
        batch = tf.nest.map_structure(
            tf.convert_to_tensor, (gather(inputs, own), gather(targets, own))
        )
        step(*batch, tf.constant(weight, tf.float32))
    save(keras_weights(model))
    hvd.shutdown()


main()
