"""The samples as TensorFlow's programs take them: arrays in memory, or a `tf.data` pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from benchmarks.peers.workloads import Workload


def in_memory(work: Workload, rank: int, replicas: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Local batches `[batch, ...]`, indexed from arrays."""
    inputs, targets = work.arrays()
    for rows in work.local_batches(rank, replicas):
        yield inputs[rows], targets[rows]


def dataset(work: Workload) -> tf.data.Dataset:
    """Global batches of a whole run; shuffled beforehand, in the order that all contenders share."""
    inputs, targets = work.arrays()
    order = np.concatenate([work.order(epoch) for epoch in range(work.epochs)])
    samples = tf.data.Dataset.from_tensor_slices((inputs[order], targets[order]))
    return samples.batch(work.global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def local_dataset(work: Workload, rank: int, replicas: int) -> tf.data.Dataset:
    """Local batches of a whole run, for a program that shards by itself."""
    inputs, targets = work.arrays()
    order = np.concatenate(list(work.local_batches(rank, replicas)))
    samples = tf.data.Dataset.from_tensor_slices((inputs[order], targets[order]))
    share = work.global_batch_size // replicas
    return samples.batch(share, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
