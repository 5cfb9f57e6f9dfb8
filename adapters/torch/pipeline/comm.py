"""Communicator of replicas in several processes: collectives along the data axis, transfers in a replica."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from isotrain.adapters.common.pipeline.topology import ReplicaTopology
from isotrain.adapters.torch.base.initial_broadcast import (
    broadcast_bundle,
    broadcast_initial_values,
    dense,
)
from isotrain.adapters.torch.comm.base import Communicator, Wait
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import DATA, ProcessContext, Subgroups, UnsupportedError

_MAX_RANK = 8
"""Maximum rank of a tensor whose spec is sent to another process."""
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.bool),
)


class PipelineCommunicator(Communicator):
    """Communicator of one stage or part with its copies, and with the other processes of its replica.

    The collectives of `Communicator` run among all processes with the same stage or part; `rank` and
    `replicas` are those along the data axis. Transfers name the index of a process in the replica.

    Attributes:
        topology: Processes of the replica.
        stands_for_all: Whether this process takes its own tensors for those of all others, as in a plan.
    """

    stands_for_all = False

    def __init__(self, context: ProcessContext) -> None:
        mesh = context.device_mesh
        self._world_rank = context.rank
        self.rank = mesh.coordinates(context.rank)[DATA]
        self.replicas = mesh.size(DATA)
        self.topology = ReplicaTopology(context)
        self._pending: dict[Hashable, list[Callable[[], None]]] = {}

    def wrap(self, trainer: ReplicaTrainer) -> None:
        self.module = trainer.loss_module.forward
        tensors = trainer.tensors()
        device = next(iter(tensors.values())).device
        broadcast_initial_values(tensors, device, self._broadcast_first)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        mean = self.all_reduce(scalar, "mean")
        return lambda: mean

    def wait_gradients(self) -> None:
        return

    def replica_mesh(self, device: torch.device) -> DeviceMesh:
        """Device mesh of this replica's processes, whose axis is that along which they share it. Local.

        Raises:
            UnsupportedError: The processes communicate by something else than torch's process groups.
        """
        raise UnsupportedError(
            "strategy tensor: torch cuts native modules over its process groups, which this backend does not"
            " have. Use backend torch-ddp, or a portable model."
        )

    @abstractmethod
    def _broadcast_first(self, vector: torch.Tensor) -> object:
        """Broadcasts a uint8 vector from rank 0, in place. Collective over all processes."""

    @abstractmethod
    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor of any shape over all processes. Collective."""

    @abstractmethod
    def max_over_all(self, value: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum, any shape, over all processes. Collective."""

    @abstractmethod
    def sum_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor of any shape over the processes of this replica. Collective over these."""

    @abstractmethod
    def max_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum, any shape, over the processes of this replica. Collective over these."""

    def broadcast_in_replica(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcasts a tensor, any shape, from one process of this replica to all, in place. Collective."""
        broadcast_bundle(
            list(dense(tensor.detach())), lambda vector: self._broadcast_from(vector, source)
        )

    @abstractmethod
    def _broadcast_from(self, vector: torch.Tensor, source: int) -> None:
        """Broadcasts a uint8 vector from one process of this replica, in place."""

    @abstractmethod
    def _isend(self, tensor: torch.Tensor, destination: int) -> Callable[[], None]:
        """Starts to send a contiguous tensor of any shape; the returned function waits, then frees it."""

    @abstractmethod
    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Receives a tensor of the shape and dtype of another, in sending order. Point-to-point."""

    def send(self, tensor: torch.Tensor, destination: int, key: Hashable) -> None:
        """Starts to send a tensor to another process, and keeps it until `wait_sent(key)`. Point-to-point.

        Args:
            tensor: Tensor of any shape.
            destination: Index of the process in the replica.
            key: Transfer that the tensor belongs to.
        """
        waiting = self._isend(tensor.contiguous(), destination)
        self._pending.setdefault(key, []).append(waiting)

    def send_spec(self, tensor: torch.Tensor, destination: int, key: Hashable) -> None:
        """Sends a tensor's shape and dtype ahead of it: int64, shape `[2 + _MAX_RANK]`. Point-to-point."""
        shape = [*tensor.shape, *[0] * (_MAX_RANK - tensor.dim())]
        header = [_DTYPES.index(tensor.dtype), tensor.dim(), *shape]
        self.send(torch.tensor(header, device=tensor.device), destination, key)

    def receive_spec(self, source: int, device: torch.device) -> torch.Tensor:
        """Receives what `send_spec` sent; returns an empty tensor of that shape and dtype. Point-to-point."""
        header = torch.empty(2 + _MAX_RANK, dtype=torch.int64, device=device)
        dtype, rank, *shape = self.receive(header, source).tolist()
        return torch.empty(shape[:rank], dtype=_DTYPES[dtype], device=device)

    def wait_sent(self, key: Hashable) -> None:
        """Waits until the tensors sent under a key have arrived, and frees them. Local."""
        for wait in self._pending.pop(key, []):
            wait()

    @property
    def pending_sends(self) -> Sequence[Hashable]:
        """Keys of the tensors that are kept because they may not have arrived yet."""
        return list(self._pending)

    def wait_all_sent(self) -> None:
        """Waits until all tensors that were sent have arrived. Local."""
        for key in self.pending_sends:
            self.wait_sent(key)

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        raise unsupported_collective()

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        raise unsupported_collective()

    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        raise unsupported_collective()

    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        raise unsupported_collective()

    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        raise unsupported_collective()

    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        raise unsupported_collective()


def unsupported_collective() -> UnsupportedError:
    """The error for collectives that pipeline runs do not have."""
    return UnsupportedError(
        "pipeline runs have no such collective: stages exchange activations only."
    )
