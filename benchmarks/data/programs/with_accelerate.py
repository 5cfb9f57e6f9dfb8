"""Hugging Face Accelerate, with a `DataLoader` that it shards."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from benchmarks.data.job import Clock, Job
from benchmarks.data.programs.torch_by_hand import loader_by_position
from benchmarks.data.workloads import torch_loss, torch_model


def main() -> None:
    """Trains one replica."""
    job, accelerator = Job.of_this_process(), Accelerator(cpu=True)
    torch.set_num_threads(1)
    model = torch_model(job.name)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_by_position(job))
    clock = Clock(job, accelerator.process_index)
    for _ in range(job.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(torch_loss(targets, model(inputs)))
            optimizer.step()
        clock.epoch_done()
    accelerator.end_training()


if __name__ == "__main__":
    main()
