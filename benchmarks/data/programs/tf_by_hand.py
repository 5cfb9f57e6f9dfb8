"""`tf.data` with its own parallelism, and a loop by hand; one replica, images only."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from benchmarks.data.job import Clock, Job
from benchmarks.data.workloads import tensorflow_model


def images(job: Job, *, by_pillow: bool = False) -> tf.data.Dataset:
    """Batches of images that TensorFlow's operations decode, crop and flip, or Pillow and NumPy."""
    work = job.work
    samples = work.dataset()
    paths = [str(work.folder / f"{index}.jpg") for index in range(work.samples)]
    classes = [index % 10 for index in range(work.samples)]

    def decoded(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        pixels = tf.image.random_flip_left_right(tf.image.random_crop(pixels, (224, 224, 3)))
        return tf.transpose(pixels, (2, 0, 1)), label

    def by_position(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels, label = tf.numpy_function(
            lambda at: (samples[at][0], np.int32(at % 10)), [index], [tf.uint8, tf.int32]
        )
        return tf.ensure_shape(pixels, (3, 224, 224)), tf.ensure_shape(label, ())

    columns = tf.data.Dataset.from_tensor_slices((paths, classes))
    if by_pillow:
        columns = tf.data.Dataset.range(work.samples)
    made = columns.shuffle(work.samples).map(
        by_position if by_pillow else decoded, max(1, job.workers)
    )
    return made.batch(work.global_batch_size).prefetch(2)


def main() -> None:
    """Trains one replica."""
    job = Job.of_this_process()
    tf.config.threading.set_inter_op_parallelism_threads(max(1, job.workers))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    model, rate = tensorflow_model(job.name), 0.01

    @tf.function
    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, model(inputs))
            loss = tf.reduce_mean(losses)
        weights = [variable.value for variable in model.trainable_variables]
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(rate * gradient)
        return loss

    dataset, clock = images(job, by_pillow=job.options == "pillow"), Clock(job, 0)
    for _ in range(job.epochs):
        for inputs, targets in dataset:
            step(inputs, targets)
        clock.epoch_done()


if __name__ == "__main__":
    main()
