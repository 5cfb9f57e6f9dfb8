"""DistributedDataParallel by hand; with one replica, torch alone."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import torch_data, torch_models
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.workloads import MOMENTUM


def main() -> None:
    job = Job.of_this_process()
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(job.threads)
    model = torch_models.build(job.work)
    if job.replicas > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), job.work.rate, MOMENTUM)
    loss_function = nn.CrossEntropyLoss()
    clock = Clock(job)
    batches = torch_data.local_batches(job.work, rank, job.replicas, job.options["loader"])
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        clock.step_done(loss.detach())
    clock.write(rank)
    if job.replicas > 1:
        dist.barrier()  # torch aborts now and then in a process whose peer leaves first
        del model, loss
        dist.destroy_process_group()


main()
