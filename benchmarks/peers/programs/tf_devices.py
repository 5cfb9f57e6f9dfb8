"""The devices that TensorFlow's programs run on."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.peers.job import Job


def use_threads(job: Job, replicas: int = 1) -> None:
    """Sets the threads of this process, before TensorFlow's first operation.

    Args:
        job: Job with the number of threads of each replica.
        replicas: Number of replicas in this process, which share its threads.
    """
    threads = job.threads * replicas
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)  # else as many as there are cores


def mirrored_strategy(replicas: int) -> tf.distribute.Strategy:
    """One replica per logical CPU device."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    )
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
