"""Horovod with torch by hand."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import nn

from benchmarks.peers import torch_data, torch_models
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.workloads import MOMENTUM


def main() -> None:
    job = Job.of_this_process()
    hvd.init()
    torch.set_num_threads(job.threads)
    model = torch_models.build(job.work)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), job.work.rate, MOMENTUM),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    loss_function = nn.CrossEntropyLoss()
    clock = Clock(job)
    batches = torch_data.local_batches(job.work, hvd.rank(), hvd.size(), job.options["loader"])
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        clock.step_done(loss.detach())
    clock.write(hvd.rank())
    hvd.shutdown()


main()
