"""The torch implementation of `Replica`, which a strategy's computations are given."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import ReduceOp, Replica, StatePart, Subgroups, TensorFunctions, spans_of_range


class TorchFunctions(TensorFunctions):
    """The same results as `keras.ops` on torch, to the bit, without Keras."""

    def __init__(self, device: torch.device) -> None:
        """Sets the device of new tensors."""
        self._device = device

    def abs(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()

    def cast(self, x: torch.Tensor, dtype: str | torch.dtype) -> torch.Tensor:
        return torch.as_tensor(x, device=self._device).to(_dtype(dtype))

    def concatenate(self, xs: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        return torch.cat(list(xs), axis)

    def maximum(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x1, x2)

    def qr(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, r = torch.linalg.qr(x)
        return q, r

    def reshape(self, x: torch.Tensor, newshape: Sequence[int]) -> torch.Tensor:
        return x.reshape(tuple(newshape))

    def scatter(
        self, indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        return values.new_zeros(tuple(shape)).index_add_(0, indices[:, 0], values)

    def split(
        self, x: torch.Tensor, indices_or_sections: Sequence[int], axis: int = 0
    ) -> list[torch.Tensor]:
        return list(torch.tensor_split(x, list(indices_or_sections), axis))

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return x[indices.long()]

    def top_k(
        self, x: torch.Tensor, k: int, sorted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, k, sorted=sorted)
        return values, indices

    def transpose(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()

    def zeros(self, shape: Sequence[int], dtype: str | torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=_dtype(dtype), device=self._device)

    def zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype, also by its name."""
    resolved: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return resolved


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
        flat = [weights[index].detach().reshape(-1) for index in indices]
        return torch.cat([_empty(weights), *flat])

    def write_weights(self, indices: Sequence[int], vector: torch.Tensor) -> None:
        weights = list(self._trainer.trainable.values())
        _write_flat([weights[index] for index in indices], vector)

    def read_range(self, start: int, stop: int) -> torch.Tensor:
        weights = self._trainer.part("trainable")
        spans = spans_of_range([weight.numel() for weight in weights], start, stop)
        flat = [weights[index].detach().reshape(-1)[first:end] for index, first, end in spans]
        return torch.cat([_empty(weights), *flat])

    def write_range(self, start: int, vector: torch.Tensor) -> None:
        weights = self._trainer.part("trainable")
        sizes = [weight.numel() for weight in weights]
        for index, first, end in spans_of_range(sizes, start, start + len(vector)):
            weight, values, vector = weights[index], vector[: end - first], vector[end - first :]
            flat = weight.detach().reshape(-1)
            flat[first:end] = values
            if not weight.is_contiguous():  # flat is a copy
                weight.copy_(flat.view_as(weight))

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


def _empty(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Vector of length 0 in the widest dtype of the weights."""
    widest = functools.reduce(torch.promote_types, [weight.dtype for weight in weights])
    return weights[0].new_empty(0, dtype=widest)


def _write_flat(tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
    """Overwrites tensors by the consecutive elements of a vector, shape `[sum of their sizes]`."""
    values = vector.split([tensor.numel() for tensor in tensors])
    for tensor, value in zip(tensors, values, strict=bool(tensors)):
        tensor.copy_(value.view_as(tensor))
