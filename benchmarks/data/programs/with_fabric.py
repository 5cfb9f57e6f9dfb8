"""Lightning Fabric, with a `DataLoader` that it shards."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric

from benchmarks.data.job import Clock, Job
from benchmarks.data.programs.torch_by_hand import loader_by_position
from benchmarks.data.workloads import torch_loss, torch_model


def main() -> None:
    """Trains one replica."""
    job = Job.of_this_process()
    fabric = Fabric(
        accelerator="cpu", devices=job.replicas, strategy="ddp" if job.replicas > 1 else "auto"
    )
    fabric.launch()
    torch.set_num_threads(1)
    model = torch_model(job.name)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.01))
    loader = fabric.setup_dataloaders(loader_by_position(job))
    clock = Clock(job, fabric.global_rank)
    for _ in range(job.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(torch_loss(targets, model(inputs)))
            optimizer.step()
        clock.epoch_done()


if __name__ == "__main__":
    main()
