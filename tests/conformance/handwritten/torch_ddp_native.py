"""DistributedDataParallel with a torch module and a torch optimizer, by hand."""

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
    local_batch,
    save,
    start_weights,
    torch_optimizer,
)
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    dist.init_process_group("gloo")
    model = cases.torch_model()
    model.load_state_dict({name: torch.from_numpy(v) for name, v in start_weights().items()})
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch_optimizer(ddp.parameters())
    images, classes = cases.torch_data()
    for rows in global_batches():
        own, weight = local_batch(rows, RANK)
        optimizer.zero_grad()
        logits = ddp(torch.from_numpy(gather(images, own)))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(gather(classes, own)))
        (loss * weight).backward()
        optimizer.step()
    save({name: value.numpy() for name, value in model.state_dict().items()})
    dist.barrier()
    del ddp, logits, loss
    gc.collect()  # its destructor, which holds Python's lock, must not be what ends the group's threads
    dist.destroy_process_group()


main()
