"""Process group in which one process stands for all: it records what it would send, and sends nothing.

torch's own `fake` process group does not serve: DistributedDataParallel refuses the results of its work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.without_values import COLLECTIVES
from isotrain.plugin import RECORDED, Message

_messages: list[Message] = []


class _DoneWork(dist.Work):
    """Work of a collective that is done when it is started."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class RecordedGroup(dist.ProcessGroup):
    """Process group with torch's collectives, as if the tensors of all processes were those of this one.

    Sums are left as they are. A tensor that is received is the last one of its shape and dtype that was sent,
    or zeros.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._sent: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Records an all-reduce of tensors of any shapes, which stay as they are."""
        return self._record("all-reduce", tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Records a broadcast of tensors of any shapes, which stay as they are."""
        return self._record("broadcast", tensors, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Copies each input, any shape, to its outputs, one for each process."""
        for copies, tensor in zip(outputs, inputs, strict=True):
            for copy in copies:
                copy.copy_(tensor)
        return self._record("all-gather", [copy for copies in outputs for copy in copies], outputs)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Fills the output, as many times as large as there are processes, with copies of a tensor."""
        output.view(self.size(), -1).copy_(tensor.reshape(1, -1).clone())  # it may be a part of it
        return self._record("all-gather", [output], output)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Copies this process's part of a tensor, as many times as large as the output."""
        output.copy_(tensor.view(self.size(), -1)[self.rank()].view_as(output).clone())
        return self._record("reduce-scatter", [tensor], output)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Fills each output as `all_gather_single` does."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return _DoneWork(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Fills each output as `reduce_scatter_single` does."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor)
        return _DoneWork(outputs)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        """Copies this process's part, any shape, of what it scatters; the others are sent one by one."""
        for output, parts in zip(outputs, inputs, strict=True):
            for index, part in enumerate(parts):
                if index == self.rank():
                    output.copy_(part)
                else:
                    self.send([part], index, 0)
        return _DoneWork(outputs)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        """Records that tensors of any shapes are sent to a rank of the group."""
        ranks = dist.get_process_group_ranks(self)
        peers = ranks[self.rank()], ranks[destination]
        self._sent |= {(tensor.shape, tensor.dtype): tensor for tensor in tensors}
        return self._record("send", tensors, tensors, peers)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Fills tensors of any shapes."""
        for tensor in tensors:
            sent = self._sent.get((tensor.shape, tensor.dtype))
            tensor.zero_() if sent is None else tensor.copy_(sent)
        return _DoneWork(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Does nothing."""
        return _DoneWork([])

    _allgather_base = all_gather_single  # names before torch 2.13
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _record(
        self, kind: str, tensors: Sequence[torch.Tensor], result: Any, ranks: Sequence[int] = ()
    ) -> dist.Work:
        ranks = tuple(ranks or dist.get_process_group_ranks(self))
        record(Message(kind, sum(tensor.nbytes for tensor in tensors), ranks))
        return _DoneWork(result)

    def getBackendName(self) -> str:
        """Name of the backend, for torch."""
        return RECORDED

    @property
    def group_name(self) -> str:
        """Name of the group, by which `DeviceMesh` finds it."""
        return private_api.process_group_name(self)


@contextlib.contextmanager
def recorded_messages() -> Iterator[Sequence[Message]]:
    """Context that gives what this process would have sent since it was entered. Local."""
    _messages.clear()
    yield _messages


def record(message: Message) -> None:
    """Records a message of this process. Local."""
    _messages.append(message)


def _all_reduce(tensor: torch.Tensor, operation: str, group: Any) -> torch.Tensor:
    output = tensor.clone()
    private_api.process_group_of(group).allreduce([output])
    return output


def _all_gather(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    output = tensor.new_empty((size * len(tensor), *tensor.shape[1:]))
    private_api.process_group_of(group).all_gather_single(output, tensor)
    return output


def _reduce_scatter(tensor: torch.Tensor, operation: str, size: int, group: Any) -> torch.Tensor:
    output = tensor.new_empty((len(tensor) // size, *tensor.shape[1:]))
    private_api.process_group_of(group).reduce_scatter_single(output, tensor)
    return output


def register() -> None:
    """Makes the group known to torch under its name, and to DTensors without values. Local."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> RecordedGroup:
        return RecordedGroup(rank, size)

    COLLECTIVES.update(
        all_reduce=_all_reduce,
        all_gather_into_tensor=_all_gather,
        reduce_scatter_tensor=_reduce_scatter,
    )
    if RECORDED not in dist.Backend.backend_list:
        dist.Backend.register_backend(RECORDED, create, devices=["cpu"])
