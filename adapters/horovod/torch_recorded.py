"""Operations and communicator of Horovod under torch in a process that stands for all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from isotrain.adapters.horovod.recorded import ProcessSets, RecordedLibrary
from isotrain.adapters.horovod.torch_comm import HorovodCommunicator, to_sendable
from isotrain.adapters.torch.comm import recorded_group
from isotrain.plugin import Message, Subgroups, local_subgroup


class RecordedOperations(RecordedLibrary):
    """Horovod's compiled operations, which compute with this process's tensors in place of all others'.

    A tensor that is received is the last one of its shape and dtype that was sent, or zeros.
    """

    def __init__(self, library: Any, rank: int, process_sets: ProcessSets) -> None:
        super().__init__(library, rank, process_sets)
        self._handles = itertools.count()
        self._sent: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        compiled = super().__getattr__(name)  # there is none for dtypes that Horovod does not send
        operation, is_asynchronous, _ = name.removeprefix("horovod_torch_").partition("_async_")
        return getattr(self, operation) if is_asynchronous else compiled

    def allreduce(self, tensor: torch.Tensor, output: torch.Tensor, *options: Any) -> int:
        """Copies a tensor of any shape."""
        output.copy_(tensor)
        return self._noted("all-reduce", tensor.nbytes, options[-1], is_fused=True)

    def grouped_allreduce(
        self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *options: Any
    ) -> int:
        """Copies tensors of any shapes, which Horovod reduces together."""
        for tensor, output in zip(tensors, outputs, strict=True):
            output.copy_(tensor)
        return self._noted("all-reduce", sum(each.nbytes for each in tensors), options[-1])

    def allgather(
        self, tensor: torch.Tensor, output: torch.Tensor, name: bytes, process_set: int
    ) -> int:
        """Concatenates copies of a tensor along its first axis."""
        size = len(self._process_sets[process_set])
        output.set_(tensor.repeat(size, *[1] * (tensor.dim() - 1)))
        return self._noted("all-gather", output.nbytes, process_set, is_fused=True)

    def broadcast(
        self, tensor: torch.Tensor, output: torch.Tensor, root: int, name: bytes, process_set: int
    ) -> int:
        """Copies a tensor of any shape if this process sends it; between two processes it is a transfer."""
        ranks, key = self._process_sets[process_set], (tensor.shape, tensor.dtype)
        is_transfer = len(ranks) == 2
        if root == self._rank:
            self._sent[key] = tensor
            output.copy_(tensor)
        elif key in self._sent:
            output.copy_(self._sent[key])
        else:
            output.zero_()
        if is_transfer and root != self._rank:
            return next(self._handles)
        return self._noted("send" if is_transfer else "broadcast", tensor.nbytes, process_set)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: torch.Tensor,
        output: torch.Tensor,
        counts: torch.Tensor,
        name: bytes,
        process_set: int,
    ) -> int:
        """Concatenates copies of this process's own rows."""
        ranks = self._process_sets[process_set]
        own = tensor.split(splits.tolist())[ranks.index(self._rank)]
        output.set_(own.repeat(len(ranks), *[1] * (own.dim() - 1)))
        counts.set_(splits.new_full((len(ranks),), len(own)))
        return self._noted("all-to-all", tensor.nbytes, process_set)

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        """Does nothing: every operation is done at once."""

    def horovod_torch_barrier(self, process_set: int) -> int:
        """Does nothing."""
        return next(self._handles)

    def horovod_torch_reset(self) -> None:
        """Does nothing."""

    def _noted(self, kind: str, nbytes: int, process_set: int, is_fused: bool = False) -> int:
        recorded_group.record(Message(kind, nbytes, self._process_sets[process_set], is_fused))
        return next(self._handles)


class RecordedCommunicator(HorovodCommunicator):
    """Communicator that knows what sizes other processes would send."""

    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """Returns parts of this process's own shard."""
        members = local_subgroup(self.rank, subgroups or [range(self.replicas)])
        if not members:
            return shard.clone()
        padded = torch.cat([shard, shard.new_zeros(max(sizes))])
        gathered = torch.cat([padded[:size] for size in sizes])
        nbytes = sum(sizes) * to_sendable(shard).element_size()
        recorded_group.record(Message("all-gather", nbytes, members, True))
        return gathered

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        """Returns this process's own tensor."""
        if destination != self.rank:
            sent = to_sendable(value)
            recorded_group.record(Message("send", sent.nbytes, (self.rank, destination)))
        return value.clone()
