"""Hugging Face Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers import torch_data, torch_models
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.workloads import MOMENTUM


def main() -> None:
    job = Job.of_this_process()
    work = job.work
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(job.threads)
    model = torch_models.build(work)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), work.rate, MOMENTUM),
        DataLoader(
            torch_data.dataset(work),
            work.global_batch_size // job.replicas,
            sampler=torch_data.CommonOrder(work),
        ),
    )
    loss_function = nn.CrossEntropyLoss()
    clock = Clock(job)
    for _ in range(work.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            clock.step_done(loss.detach())
    clock.write(accelerator.process_index)
    accelerator.end_training()


main()
