"""How one torch replica exchanges with the others: the contract, and the null object for one replica."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import CompressionMethod, IsotrainError, ReduceOp, Subgroups, unknown_name

Wait = Callable[[], torch.Tensor]


class Communicator(ABC):
    """The ties of one replica (one process) to the others.

    Attributes:
        replicas: Replicas in the run.
        rank: This one's index.
        module: What to call for a forward pass whose gradients will be exchanged:
            `module(inputs, targets)` gives loss (see `ReplicaTrainer.loss_module`) and predictions.
    """

    replicas: int
    rank: int
    module: Callable[..., tuple[torch.Tensor, Any]]

    @abstractmethod
    def wrap(self, trainer: ReplicaTrainer) -> None:
        """Makes all replicas' weights those of replica 0, and arranges for gradients to be exchanged."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Within it, backward passes only add to the local gradients."""

    @abstractmethod
    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        """Starts the mean of a scalar over all replicas; the result is given when waited for."""

    def reduce_loss_async(self, share: torch.Tensor) -> Wait:
        """As `all_reduce_mean_async`, for the loss of a synchronised step, before its backward pass."""
        return self.all_reduce_mean_async(share)

    @abstractmethod
    def wait_gradients(self) -> None:
        """Returns once every parameter's `.grad` is the mean over all replicas."""

    def require_all_reduced(self) -> None:
        """Raises a SpecError if the last step's gradients, which it reduces natively, are not all reduced."""
        return

    @abstractmethod
    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Reduces one tensor over all replicas, into a new tensor."""

    @abstractmethod
    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """Stacks the tensors of all replicas: shape `[replicas, *shape]`."""

    @abstractmethod
    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """Sums a vector over all replicas, or those of the own set, each of which gets its part."""

    @abstractmethod
    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """Joins the parts of all replicas, or those of the own set, into one vector."""

    @abstractmethod
    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        """Sends to one replica while receiving a tensor of equal shape from another."""

    @abstractmethod
    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """Sums over the replicas of each part, into a new tensor."""

    @abstractmethod
    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """Gives each part the tensor of its first replica."""

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        """Arranges for gradients to be exchanged compressed; False if it cannot."""
        return False

    def state(self) -> dict[str, torch.Tensor]:
        """What it keeps from step to step, by name."""
        return {}

    def write_state(self, name: str, value: torch.Tensor) -> None:
        """Sets one of these.

        Raises:
            IsotrainError: It keeps nothing of that name.
        """
        raise IsotrainError(unknown_name("state", f"exchange/{name}", self.state()))

    def warm_up(self) -> AbstractContextManager[Any] | None:
        """Within it, a backward pass lets the exchange arrange itself; None where it needs none."""
        return None

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every replica has called it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group of replicas."""


class SingleReplicaCommunicator(Communicator):
    """The null object: one replica, no process group, no ports."""

    replicas = 1

    def __init__(self, rank: int = 0) -> None:
        """Is alone as this replica, whose random numbers it draws."""
        self.rank = rank

    def wrap(self, trainer: ReplicaTrainer) -> None:
        self.module = trainer.loss_module.forward  # no exchange hangs on the module's hooks

    def no_sync(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        return lambda: scalar

    def wait_gradients(self) -> None:
        return

    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        return value.clone()

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone().unsqueeze(0)

    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        return vector.clone()

    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        return shard.clone()

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        return value.clone()

    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        return value.clone()

    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        return value.clone()

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


def all_reduce_mean_flat(
    communicator: Communicator, tensors: Sequence[torch.Tensor], weight: float
) -> None:
    """Replaces tensors, in place, by their weighted mean over all replicas, in one exchange a dtype.

    Args:
        communicator: The ties to the other replicas.
        tensors: The same shapes on every replica.
        weight: This replica's weight; the mean of all replicas' weights is 1.
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        for members in by_type.values():
            flat = torch.cat([member.reshape(-1) for member in members])
            if weight != 1.0:
                flat.mul_(weight)
            mean = communicator.all_reduce(flat, "mean")
            parts = mean.split([member.numel() for member in members])
            for member, part in zip(members, parts, strict=True):
                member.copy_(part.view_as(member))
