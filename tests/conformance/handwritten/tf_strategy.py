"""A loop over `strategy.run`, by hand, for MirroredStrategy and MultiWorkerMirroredStrategy.

Gradients are averaged first, all in one exchange, and applied by an optimizer that does not sum again.
"""

from __future__ import annotations

import os

import keras
import tensorflow as tf
from conformance import cases
from conformance.handwritten.common import (
    JOB,
    RANK,
    REPLICAS,
    gather,
    global_batches,
    keras_model,
    keras_optimizer,
    keras_weights,
    load_keras,
    local_batch,
    save,
)


def make_strategy() -> tf.distribute.Strategy:
    if "TF_CONFIG" in os.environ:
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(REPLICAS)]
    )
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(REPLICAS)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def averaged(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """The means over all replicas, exchanged as one flat tensor."""
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, flat)
    parts = tf.split(total / REPLICAS, [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def mean_loss(outputs: cases.Arrays, targets: cases.Arrays) -> tf.Tensor:
    """The mean over this replica's samples; Keras' loss objects would divide it by the replicas."""
    means = []
    for name in ("class", "next"):
        values = keras.losses.sparse_categorical_crossentropy(
            targets[name], outputs[name], from_logits=True
        )
        means.append(tf.reduce_sum(values) / tf.cast(tf.size(values), values.dtype))
    return means[0] + means[1]


def main() -> None:
    threads = int(JOB["tensorflow_threads"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    strategy = make_strategy()
    with strategy.scope():
        model = keras_model()
        optimizer = keras_optimizer()
        optimizer.build(model.trainable_variables)
        load_keras(model)  # within the scope, where an assignment reaches every copy
    variables = model.trainable_variables
    mine = range(REPLICAS) if strategy.extended.worker_devices[1:] else [RANK]

    @tf.function(autograph=False)
    def step(batches: list[tuple[cases.Arrays, cases.Arrays]], weights: tf.Tensor) -> tf.Tensor:
        def replica() -> tf.Tensor:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            place = int(tf.get_static_value(number)) if len(batches) > 1 else 0
            inputs, targets = batches[place]
            with tf.GradientTape() as tape:
                loss = mean_loss(model(inputs, training=True), targets) * weights[place]
            gradients = tape.gradient(loss, [v.value for v in variables])
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            loss, *means = averaged([loss, *dense])
            optimizer.apply(means, variables)
            return loss

        return strategy.run(replica)

    # The gradients are means already: without this Keras would add them up once more.
    optimizer._all_reduce_sum_gradients = lambda gradients: gradients
    inputs, targets = cases.training_data()
    for rows in global_batches():
        shares = [local_batch(rows, replica) for replica in mine]
        batches = [(gather(inputs, own), gather(targets, own)) for own, _ in shares]
        step(
            tf.nest.map_structure(tf.convert_to_tensor, batches),
            tf.constant([weight for _, weight in shares], tf.float32),
        )
    save(keras_weights(model))


main()
