"""Training loops as a person writes them for one framework, without isotrain.

Each function sets up a model and returns `train(steps)`, which runs so many steps over the data in
memory and keeps the mean loss of every global batch, as isotrain does. They use the process group,
strategy or Horovod that the process has started already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import workload

Train = Callable[[int], None]


def for_backend(
    backend: str, width: int, depth: int, rank: int, replicas: int, group: Any
) -> Train:
    """Sets up the hand-written loop for a backend."""
    makers = {
        "torch-ddp": torch_ddp,
        "horovod-torch": horovod_torch,
        "tf-mirrored": tf_strategy,
        "tf-multiworker": tf_strategy,
        "horovod-tf": horovod_tf,
    }
    model = workload.model(width, depth)
    if backend.startswith("tf-") and replicas > 1:
        with group.strategy.scope():
            model = workload.model(width, depth)
    return makers[backend](model, rank, replicas, group)


def _batches(rank: int, replicas: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This replica's equal share of every global batch, in a new order every epoch, without end."""
    inputs, targets = workload.arrays()
    share = workload.GLOBAL_BATCH // replicas
    for epoch in itertools.count():
        order = np.random.default_rng([0, epoch]).permutation(len(inputs))
        for start in range(0, len(inputs), workload.GLOBAL_BATCH):
            rows = order[start + rank * share : start + (rank + 1) * share]
            yield inputs[rows], targets[rows]


def _loss_and_optimizer() -> tuple[Any, Any]:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss, keras.optimizers.SGD(workload.RATE, momentum=workload.MOMENTUM)


def torch_ddp(model: Any, rank: int, replicas: int, group: Any) -> Train:
    """DistributedDataParallel around a Keras model, with its Keras optimizer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    loss_function, optimizer = _loss_and_optimizer()
    optimizer.build(model.trainable_variables)
    parameters = [variable.value for variable in model.trainable_variables]
    forward = model
    if replicas > 1:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
    batches = _batches(rank, replicas)
    losses = []

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = map(torch.from_numpy, next(batches))
            for parameter in parameters:
                parameter.grad = None
            loss = loss_function(targets, forward(inputs, training=True))
            mean = loss.detach().clone()
            if replicas > 1:
                work = dist.all_reduce(mean, async_op=True)
            loss.backward()
            with torch.no_grad():
                gradients = [parameter.grad for parameter in parameters]
                optimizer.apply(gradients, model.trainable_variables)
            if replicas > 1:
                work.wait()
                mean /= replicas
            losses.append(mean)

    return train


def horovod_torch(model: Any, rank: int, replicas: int, group: Any) -> Train:
    """Horovod's grouped all-reduce over a Keras model's gradients."""
    if replicas == 1:
        return torch_ddp(model, rank, replicas, group)
    import horovod.torch as hvd
    import torch

    loss_function, optimizer = _loss_and_optimizer()
    optimizer.build(model.trainable_variables)
    parameters = [variable.value for variable in model.trainable_variables]
    batches = _batches(rank, replicas)
    losses = []

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = map(torch.from_numpy, next(batches))
            for parameter in parameters:
                parameter.grad = None
            loss = loss_function(targets, model(inputs, training=True))
            mean = hvd.allreduce_async(loss.detach(), name="by-hand-loss")
            loss.backward()
            with torch.no_grad():
                gradients = hvd.grouped_allreduce(
                    [parameter.grad for parameter in parameters], name="by-hand"
                )
                optimizer.apply(gradients, model.trainable_variables)
            losses.append(hvd.synchronize(mean))

    return train


def tf_strategy(model: Any, rank: int, replicas: int, group: Any) -> Train:
    """A `strategy.run` loop inside of a tf.function."""
    import tensorflow as tf

    strategy = group.strategy
    with strategy.scope():
        loss_function, optimizer = _loss_and_optimizer()
        optimizer.build(model.trainable_variables)
    shares = [_batches(replica, replicas) for replica in group.local_replicas]
    losses = []

    def replica_step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(targets, model(inputs, training=True)) / replicas
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(*parts: Any) -> Any:
        if len(parts) == 1:
            results = strategy.run(replica_step, args=parts[0])
        else:
            inputs, targets = (
                strategy.experimental_distribute_values_from_function(
                    lambda context, which=which: parts[context.replica_id_in_sync_group][which]
                )
                for which in (0, 1)
            )
            results = strategy.run(replica_step, args=(inputs, targets))
        return strategy.reduce("SUM", results, axis=None)

    def train(steps: int) -> None:
        for _ in range(steps):
            parts = [tuple(map(tf.convert_to_tensor, next(share))) for share in shares]
            losses.append(step(*parts))

    return train


def horovod_tf(model: Any, rank: int, replicas: int, group: Any) -> Train:
    """A tf.function with Horovod's grouped all-reduce."""
    if replicas == 1:
        return tf_strategy(model, rank, replicas, group)
    import horovod.tensorflow as hvd
    import tensorflow as tf

    loss_function, optimizer = _loss_and_optimizer()
    optimizer.build(model.trainable_variables)
    batches = _batches(rank, replicas)
    losses = []

    @tf.function
    def step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(targets, model(inputs, training=True))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        mean, *gradients = hvd.grouped_allreduce([loss, *gradients], op=hvd.Average)
        optimizer.apply(gradients, model.trainable_variables)
        return mean

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = map(tf.convert_to_tensor, next(batches))
            losses.append(step(inputs, targets))

    return train
