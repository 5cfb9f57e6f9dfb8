"""The torch implementation of `Replica`, which a strategy's computations are given."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from isotrain.adapters.torch.base.tensor_ops import TorchFunctions
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import ReduceOp, Replica, StatePart, Subgroups


class TorchReplica(Replica):
    """Replica whose collectives run eagerly; reads and writes the tensors of a trainer."""

    def __init__(self, trainer: ReplicaTrainer, communicator: Communicator) -> None:
        self.index = communicator.rank
        self.replicas = communicator.replicas
        self.ops = TorchFunctions(next(iter(trainer.trainable.values())).device)
        self._trainer = trainer
        self._communicator = communicator

    def read(self, parts: Sequence[StatePart]) -> torch.Tensor:
        tensors = self._tensors(parts)
        if not tensors:
            return torch.zeros(0, device=next(iter(self._trainer.trainable.values())).device)
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def write(self, parts: Sequence[StatePart], vector: torch.Tensor) -> None:
        _write_flat(self._tensors(parts), vector)

    def read_weights(self, indices: Sequence[int]) -> torch.Tensor:
        weights = list(self._trainer.trainable.values())
        widest = functools.reduce(torch.promote_types, [weight.dtype for weight in weights])
        flat = [weights[index].detach().reshape(-1) for index in indices]
        return torch.cat([weights[0].new_empty(0, dtype=widest), *flat])

    def write_weights(self, indices: Sequence[int], vector: torch.Tensor) -> None:
        weights = list(self._trainer.trainable.values())
        _write_flat([weights[index] for index in indices], vector)

    def _tensors(self, parts: Sequence[StatePart]) -> list[torch.Tensor]:
        """Tensors of parts of the state, in their shapes, in order."""
        return [tensor for part in parts for tensor in self._trainer.part(part)]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        return self._communicator.all_reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_gather(tensor)

    def reduce_scatter(self, vector: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._communicator.reduce_scatter(vector, sizes)

    def all_gather_shards(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._communicator.all_gather_shards(shard, sizes)

    def reduce_scatter_within(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> torch.Tensor:
        return self._communicator.reduce_scatter(vector, sizes, subgroups)

    def all_gather_shards_within(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups
    ) -> torch.Tensor:
        return self._communicator.all_gather_shards(shard, sizes, subgroups)

    def send_receive(self, tensor: torch.Tensor, destinations: Sequence[int]) -> torch.Tensor:
        source = list(destinations).index(self.index)
        return self._communicator.send_receive(tensor, destinations[self.index], source)

    def all_reduce_within(self, tensor: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        return self._communicator.all_reduce_within(tensor, subgroups)

    def broadcast_within(self, tensor: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        return self._communicator.broadcast_within(tensor, subgroups)


def _write_flat(tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
    """Overwrites tensors by the consecutive elements of a vector, shape `[sum of their sizes]`."""
    values = vector.split([tensor.numel() for tensor in tensors])
    for tensor, value in zip(tensors, values, strict=bool(tensors)):
        tensor.copy_(value.view_as(tensor))
