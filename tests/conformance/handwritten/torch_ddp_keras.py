"""DistributedDataParallel with a Keras model and a Keras optimizer, by hand."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from conformance import cases
from conformance.handwritten.common import (
    JOB,
    RANK,
    gather,
    global_batches,
    keras_model,
    keras_optimizer,
    keras_weights,
    load_keras,
    local_batch,
    save,
)
from torch.nn.parallel import DistributedDataParallel


def tensors(arrays: cases.Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    dist.init_process_group("gloo")
    model = keras_model()
    load_keras(model)
    ddp = DistributedDataParallel(model)
    optimizer = keras_optimizer()
    inputs, targets = cases.training_data()
    for rows in global_batches():
        own, weight = local_batch(rows, RANK)
        model.zero_grad()
        outputs = ddp(tensors(gather(inputs, own)), training=True)
        loss = cases.both_losses(outputs, tensors(gather(targets, own)))
        (loss * weight).backward()
        with torch.no_grad():
            gradients = [variable.value.grad for variable in model.trainable_variables]
            optimizer.apply(gradients, model.trainable_variables)
    save(keras_weights(model))
    dist.barrier()
    del ddp, outputs, loss
    gc.collect()  # its destructor, which holds Python's lock, must not be what ends the group's threads
    dist.destroy_process_group()


main()
