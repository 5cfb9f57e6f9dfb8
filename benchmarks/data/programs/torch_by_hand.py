"""`DataLoader` and `DistributedSampler` with DistributedDataParallel, by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from benchmarks.data.job import Clock, Job
from benchmarks.data.workloads import Stream, collate, torch_loss, torch_model


class Shards(IterableDataset[Any]):
    """Batches of a stream, whose files are dealt out to replicas and workers."""

    def __init__(self, stream: Stream, rank: int, replicas: int) -> None:
        self._stream, self._rank, self._replicas = stream, rank, replicas

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from self._stream(self._rank * count + number, self._replicas * count)


def loader_by_position(job: Job, sampler: Any = None) -> DataLoader[Any]:
    """The loader of one process, of samples by position; shuffled where there is no sampler."""
    workers = -(-job.workers // job.replicas)
    return DataLoader(
        job.work.dataset(),
        job.work.global_batch_size // job.replicas,
        shuffle=sampler is None,
        sampler=sampler,
        collate_fn=collate if job.work.pads else None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def _loader_of(job: Job, rank: int) -> DataLoader[Any]:
    """The loader of one process."""
    dataset = job.work.dataset()
    if not isinstance(dataset, Stream):
        return loader_by_position(job, DistributedSampler(dataset, job.replicas, rank))
    workers = -(-job.workers // job.replicas)
    local = replace(dataset, batch_size=job.work.global_batch_size // job.replicas)
    shards = Shards(local, rank, job.replicas)
    return DataLoader(shards, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def main() -> None:
    """Trains one replica, or only loads its batches."""
    job, rank = Job.of_this_process(), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    model = torch_model(job.name)
    if job.replicas > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader, clock = _loader_of(job, rank), Clock(job, rank)
    for epoch in range(job.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            if job.options == "no-steps":
                continue
            optimizer.zero_grad()
            torch_loss(targets, model(inputs)).backward()
            optimizer.step()
        if job.options == "no-steps" and job.replicas > 1:
            dist.barrier()
        clock.epoch_done()
    if job.replicas > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
