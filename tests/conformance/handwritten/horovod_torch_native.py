"""Horovod's DistributedOptimizer with a torch module, by hand."""

from __future__ import annotations

import horovod.torch as hvd
import torch
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


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    hvd.init()
    model = cases.torch_model()
    model.load_state_dict({name: torch.from_numpy(v) for name, v in start_weights().items()})
    optimizer = hvd.DistributedOptimizer(
        torch_optimizer(model.parameters()), named_parameters=model.named_parameters(), groups=1
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    images, classes = cases.torch_data()
    for rows in global_batches():
        own, weight = local_batch(rows, RANK)
        optimizer.zero_grad()
        logits = model(torch.from_numpy(gather(images, own)))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(gather(classes, own)))
        (loss * weight).backward()
        optimizer.step()
    save({name: value.numpy() for name, value in model.state_dict().items()})
    hvd.shutdown()


main()
