"""The samples as torch's programs take them: tensors in memory, or the usual loader."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.peers.workloads import Workload

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class CommonOrder(Sampler[int]):
    """Gives all samples, in every iteration in the order of the next epoch.

    Args:
        work: The samples.
        dealt_to: The replicas to which what this sampler gives is dealt out one by one.
    """

    def __init__(self, work: Workload, dealt_to: int = 1) -> None:
        self._work = work
        self._dealt_to = dealt_to
        self._epoch = 0

    def __len__(self) -> int:
        return self._work.samples

    def __iter__(self) -> Iterator[int]:
        order = self._work.dealt(self._epoch, self._dealt_to)
        self._epoch += 1
        return iter(order.tolist())


class DistributedOrder(DistributedSampler[int]):
    """torch's sampler for replicas, in the order that all contenders share."""

    def __init__(self, work: Workload, dataset: TensorDataset, rank: int, replicas: int) -> None:
        super().__init__(dataset, replicas, rank)
        self._work = work

    def __iter__(self) -> Iterator[int]:
        order = self._work.dealt(self.epoch, self.num_replicas)
        return iter(order[self.rank :: self.num_replicas].tolist())


def dataset(work: Workload) -> TensorDataset:
    """The samples as tensors."""
    return TensorDataset(*map(torch.from_numpy, work.arrays(channels_first=True)))


def in_memory(work: Workload, rank: int, replicas: int) -> Batches:
    """Local batches, indexed from tensors."""
    inputs, targets = dataset(work).tensors
    for rows in work.local_batches(rank, replicas):
        index = torch.from_numpy(rows)
        yield inputs[index], targets[index]


def loaded(work: Workload, rank: int, replicas: int) -> Batches:
    """Local batches from a `DataLoader` with a `DistributedSampler`."""
    samples = dataset(work)
    sampler = DistributedOrder(work, samples, rank, replicas)
    loader = DataLoader(samples, work.global_batch_size // replicas, sampler=sampler)
    for epoch in range(work.epochs):
        sampler.set_epoch(epoch)
        yield from loader


def local_batches(work: Workload, rank: int, replicas: int, loader: bool) -> Batches:
    """Local batches, by the usual loader or without one."""
    return (loaded if loader else in_memory)(work, rank, replicas)
