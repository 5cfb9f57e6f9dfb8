"""Lightning Fabric."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers import torch_data, torch_models
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.workloads import MOMENTUM


def main() -> None:
    job = Job.of_this_process()
    work = job.work
    fabric = Fabric(accelerator="cpu")  # `fabric run` says how many processes, and which strategy
    torch.set_num_threads(job.threads)
    model = torch_models.build(work)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), work.rate, MOMENTUM))
    loader = fabric.setup_dataloaders(
        DataLoader(
            torch_data.dataset(work),
            work.global_batch_size // job.replicas,
            sampler=torch_data.CommonOrder(work, job.replicas),
        )
    )
    loss_function = nn.CrossEntropyLoss()
    clock = Clock(job)
    for _ in range(work.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            clock.step_done(loss.detach())
    clock.write(fabric.global_rank)


main()
