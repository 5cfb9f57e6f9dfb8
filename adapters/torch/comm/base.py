"""Communicators of torch replicas: the interface, and the null object for a run of one replica."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import (
    CompressionMethod,
    IsotrainError,
    ReduceOp,
    Subgroups,
    UnsupportedError,
    unknown_name,
)

Wait = Callable[[], torch.Tensor]
"""Waits for an asynchronous collective and returns its result, as torch's `Work.wait` does."""


class Communicator(ABC):
    """Collectives between one replica (one process) and the others.

    Every method is collective, called by all replicas in the same order, unless its docstring says *Local*.

    Attributes:
        replicas: Number of replicas in the run.
        rank: Index of this replica.
        module: Forward pass whose gradients will be all-reduced, as DDP's wrapped module:
            `module(inputs, targets)` returns the loss (shapes: see `LossModule`) and the predictions.
        is_shared: Whether the connection is another communicator's, which closes it.
    """

    replicas: int
    rank: int
    module: Callable[..., tuple[torch.Tensor, Any]]
    is_shared = False

    @abstractmethod
    def wrap(self, trainer: ReplicaTrainer) -> None:
        """Broadcasts the weights of replica 0, and sets up the all-reduce of gradients. Collective."""

    def rewrap(self, trainer: ReplicaTrainer) -> None:
        """Sets up the all-reduce of the gradients that are left after weights were frozen. Collective.

        Raises:
            UnsupportedError: The backend cannot change what it all-reduces.
        """
        raise UnsupportedError(
            f"session.freeze: {type(self).__name__} all-reduces the gradients of the weights that were"
            " trained at the start, in the whole run. Use two updates, or two runs, as docs/own-loop.md"
            " shows."
        )

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Context in which backward passes only accumulate local gradients (DDP's `no_sync`). Local."""

    @abstractmethod
    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        """Starts the mean over all replicas of a scalar or vector `[2]` (`SliceWeights`). Collective."""

    def reduce_loss_async(self, share: torch.Tensor) -> Wait:
        """Starts the mean of a step's loss, scalar or `[2]`, before its backward pass. Collective."""
        return self.all_reduce_mean_async(share)

    @abstractmethod
    def wait_gradients(self) -> None:
        """Waits until every parameter's `.grad` is the mean over all replicas. Collective."""

    def require_all_reduced(self) -> None:
        """Checks that the native all-reduce of the last step covered all gradients. Local.

        Raises:
            SpecError: A weight got no gradient.
        """
        return

    @abstractmethod
    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """All-reduces a tensor of any shape; returns a new tensor of its shape and dtype. Collective."""

    @abstractmethod
    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """Stacks the tensors of all replicas: returns shape `[replicas, *value.shape]`. Collective."""

    def all_reduce_async(self, value: torch.Tensor, op: ReduceOp) -> Wait:
        """Starts an `all_reduce`; by default it is done when this returns. Collective."""
        result = self.all_reduce(value, op)
        return lambda: result

    def all_gather_async(self, value: torch.Tensor) -> Wait:
        """Starts an `all_gather`; by default it is done when this returns. Collective."""
        result = self.all_gather(value)
        return lambda: result

    @abstractmethod
    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """Reduce-scatter: sums vectors, and returns this replica's shard of the sum.

        Args:
            vector: Local addend, shape `[sum(sizes)]`.
            sizes: Shard length of each member, in order.
            subgroups: Subgroups within which to reduce; empty for all replicas.

        Returns:
            Shape `[sizes[index]]`, with `index` this replica's index among the members.
        """

    @abstractmethod
    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """All-gather of shards of different lengths.

        Args:
            shard: Local shard, shape `[sizes[index]]`, with `index` this replica's index among the members.
            sizes: Shard length of each member, in order.
            subgroups: Subgroups within which to gather; empty for all replicas.

        Returns:
            The concatenated shards, shape `[sum(sizes)]`.
        """

    @abstractmethod
    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        """Sends a tensor to a replica and receives one of its shape and dtype from another. Collective."""

    @abstractmethod
    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """Sums a tensor of any shape over this replica's subgroup; returns a new tensor. Collective."""

    @abstractmethod
    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """Returns the tensor, any shape, of the first replica of this replica's subgroup. Collective."""

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        """Makes later gradient all-reduces compressed. Local.

        Args:
            method: Compression method.
            rank: Rank of PowerSGD's matrix approximation.
            start: Uncompressed steps before PowerSGD begins.

        Returns:
            False if this communicator does not have the method; nothing has changed then.
        """
        return False

    def state(self) -> dict[str, torch.Tensor]:
        """State that outlives a step: tensors of any shapes by name, for checkpoints. Local."""
        return {}

    def write_state(self, name: str, value: torch.Tensor) -> None:
        """Restores one entry of `state`, in its shape. Local.

        Raises:
            IsotrainError: There is no state of that name.
        """
        raise IsotrainError(unknown_name("state", f"execution/{name}", self.state()))

    def warm_up(self) -> AbstractContextManager[Any] | None:
        """Context for a backward pass that lets DDP rebuild its buckets; None if not needed. Local."""
        return None

    def for_update(self) -> Self:
        """Communicator over the same connection for another trainer of the model, not wrapped yet. Local.

        Closing it leaves the connection to this one.
        """
        communicator = copy.copy(self)
        communicator.is_shared = True
        return communicator

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every replica has called it. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the process group. Collective."""


class SingleReplicaCommunicator(Communicator):
    """Null object: one replica, no process group, no ports."""

    replicas = 1

    def __init__(self, rank: int = 0) -> None:
        """Stands for a group of one.

        Args:
            rank: Index of the replica, from which its random seed is derived.
        """
        self.rank = rank

    def wrap(self, trainer: ReplicaTrainer) -> None:
        self.module = trainer.loss_module.forward  # no collective hangs on the module's hooks

    def rewrap(self, trainer: ReplicaTrainer) -> None:
        """Does nothing: there is no all-reduce."""

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
    """Replaces tensors, in place, by their weighted mean over all replicas. Collective.

    They are flattened into one vector for each dtype, and so cost one all-reduce for each dtype.

    Args:
        communicator: Communicator of the replica.
        tensors: Tensors of any shapes and dtypes, the same on every replica.
        weight: Weight of this replica; the mean of all replicas' weights is 1.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        for same_dtype in by_dtype.values():
            flat = torch.cat([each.reshape(-1) for each in same_dtype])
            if weight != 1.0:
                flat.mul_(weight)
            mean = communicator.all_reduce(flat, "mean")
            means = mean.split([each.numel() for each in same_dtype])
            for each, value in zip(same_dtype, means, strict=True):
                each.copy_(value.view_as(each))
