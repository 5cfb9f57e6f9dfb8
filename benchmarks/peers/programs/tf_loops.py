"""DCGAN and CLIP by hand under MultiWorkerMirroredStrategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from benchmarks.peers import keras_loops
from benchmarks.peers.job import Job
from benchmarks.peers.workloads import BETA_1


class _Step:
    """The step as the loss takes it: rows of all replicas, and the index at which those of this one begin."""

    def all_gather(self, rows: tf.Tensor) -> tuple[tf.Tensor, Any]:
        context = tf.distribute.get_replica_context()
        first = context.replica_id_in_sync_group * tf.shape(rows)[0]
        return context.all_gather(rows, axis=0), first


def _contrastive_loss(models: Any, batch: Any) -> tf.Tensor:
    return keras_loops.contrastive_loss(models, batch, _Step())


def training(job: Job, strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """Step of a workload: its updates one after the other, each a function and an optimizer."""
    with strategy.scope():
        models = keras_loops.build(job.work)
        weights = {name: model.trainable_variables for name, model in models.items()}
        if job.workload == "clip":
            everything = [weight for of_model in weights.values() for weight in of_model]
            steps = [_update(job, strategy, models, _contrastive_loss, everything)]
        else:
            steps = [
                _update(job, strategy, models, loss, weights[name])
                for name, loss in (
                    ("discriminator", keras_loops.discriminator_loss),
                    ("generator", keras_loops.generator_loss),
                )
            ]

    def step(inputs: Any, targets: Any) -> Any:
        losses = [update(inputs, targets) for update in steps]
        return losses[0] if len(losses) == 1 else tf.add_n(losses)

    return step


def _update(
    job: Job,
    strategy: tf.distribute.Strategy,
    models: dict[str, keras.Model],
    loss_function: Callable[..., Any],
    weights: list[Any],
) -> Callable[..., Any]:
    optimizer = keras.optimizers.Adam(job.work.rate, BETA_1, epsilon=1e-8)
    optimizer.build(weights)
    training_models = {name: partial(model, training=True) for name, model in models.items()}

    def replica_step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([weight.value for weight in weights])
            losses = loss_function(training_models, (inputs, targets))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=job.work.global_batch_size)
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    @tf.function
    def step(inputs: Any, targets: Any) -> Any:
        return job.replicas * strategy.run(replica_step, args=(inputs, targets))

    return step
