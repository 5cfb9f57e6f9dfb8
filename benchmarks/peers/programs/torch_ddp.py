"""DistributedDataParallel by hand; with one replica, torch alone."""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import torch_data, torch_models
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.programs import torch_ddp_loops
from benchmarks.peers.workloads import LOOPS, MOMENTUM


def main() -> None:
    job = Job.of_this_process()
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(job.threads)
    if job.replicas > 1:
        dist.init_process_group("gloo")
    clock = Clock(job)
    if job.workload in LOOPS:
        torch_ddp_loops.train(job, rank, clock)
    else:
        train(job, rank, clock)
    clock.write(rank)
    if job.replicas > 1:
        dist.barrier()  # torch aborts now and then in a process whose peer leaves first
        gc.collect()
        dist.destroy_process_group()


def train(job: Job, rank: int, clock: Clock) -> None:
    """Trains a model with a loss and an optimizer, and with an average of its weights where there is one."""
    model = torch_models.build(job.work)
    if job.replicas > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), job.work.rate, MOMENTUM)
    loss_function = nn.CrossEntropyLoss()
    weights = list(model.parameters())
    averages = [weight.detach().clone() for weight in weights] if job.work.ema else []
    batches = torch_data.local_batches(job.work, rank, job.replicas, job.options["loader"])
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if averages:
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, 1 - job.work.ema)
        clock.step_done(loss.detach())


main()
