"""DCGAN and CLIP by hand with DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import torch_data, torch_loops
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.workloads import BETA_1


def train(job: Job, rank: int, clock: Clock) -> None:
    """Trains the models of a workload."""
    models = torch_loops.build(job.work)
    step = {"dcgan": _dcgan, "clip": _clip}[job.workload](job, models, rank)
    for batch in torch_data.local_batches(job.work, rank, job.replicas, job.options["loader"]):
        clock.step_done(step(batch))


def _parallel(job: Job, model: nn.Module) -> nn.Module:
    return (
        DistributedDataParallel(model, gradient_as_bucket_view=True) if job.replicas > 1 else model
    )


def _dcgan(job: Job, models: dict[str, nn.Module], rank: int) -> Any:
    """Two Adams take turns; the generator's gradient needs none of the discriminator's weights."""
    generator, discriminator = models["generator"], models["discriminator"]
    parallel = {name: _parallel(job, model) for name, model in models.items()}
    optimizers = {
        name: torch.optim.Adam(model.parameters(), job.work.rate, (BETA_1, 0.999))
        for name, model in models.items()
    }

    def step(batch: Any) -> torch.Tensor:
        optimizers["discriminator"].zero_grad()
        learns = {"generator": generator, "discriminator": parallel["discriminator"]}
        first = torch_loops.discriminator_loss(learns, batch).mean()
        first.backward()
        optimizers["discriminator"].step()
        optimizers["generator"].zero_grad()
        discriminator.requires_grad_(False)
        learns = {"generator": parallel["generator"], "discriminator": discriminator}
        second = torch_loops.generator_loss(learns, batch).mean()
        second.backward()
        discriminator.requires_grad_(True)
        optimizers["generator"].step()
        return first.detach() + second.detach()

    return step


class _Gather(torch.autograd.Function):
    """Rows of all replicas in order, all as many; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        gathered = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient := gradient.contiguous())
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class _Step:
    """The step as the loss takes it: rows of all replicas, and the index at which those of this one begin."""

    def __init__(self, replicas: int, rank: int) -> None:
        self.replicas, self.rank = replicas, rank

    def all_gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        if self.replicas == 1:
            return rows, 0
        return _Gather.apply(rows), self.rank * len(rows)


def _clip(job: Job, models: dict[str, nn.Module], rank: int) -> Any:
    model = _parallel(job, _Encoders(models))
    optimizer = torch.optim.Adam(model.parameters(), job.work.rate, (BETA_1, 0.999))
    handle = _Step(job.replicas, rank)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        images, texts = model(batch)
        encoded = {"images": lambda _: images, "texts": lambda _: texts}
        loss = torch_loops.contrastive_loss(encoded, batch, handle).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class _Encoders(nn.Module):
    """Both encoders, for one DistributedDataParallel."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.models["images"](batch[0]), self.models["texts"](batch[1])
