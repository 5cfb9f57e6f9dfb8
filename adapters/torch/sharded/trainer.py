"""Base class of the trainers of fully sharded models, Keras or native."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from isotrain.adapters.torch.base.tensors import TensorOrShard
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.adapters.torch.trainer.state import Section
from isotrain.plugin import DeviceMesh, StateKind


class ShardedTrainer(ReplicaTrainer):
    """Trainer whose weights are sharded, and gathered as a forward pass reads them.

    Attributes:
        weights: Sharded weights; None before `shard_weights`.
    """

    weights: ShardedWeights | None = None

    @property
    def sharded_weights(self) -> ShardedWeights:
        """Sharded weights, after `shard_weights`."""
        assert self.weights is not None, "the group shards the weights at the start"
        return self.weights

    @abstractmethod
    def shard_weights(self, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int) -> None:
        """Keeps this replica's shard of each weight from now on, and optimizer state for it alone.

        Args:
            communicator: Communicator with the other replicas, which have the same weights.
            mesh: Device mesh; weights are sharded along its shard axis.
            unit_bytes: Size (bytes) of the weights that are gathered together, except for larger layers.

        Raises:
            SpecError: The model has weights that cannot be sharded.
        """

    @abstractmethod
    def _gathering(self, weights: ShardedWeights) -> AbstractContextManager[None]:
        """Context in which a forward pass may read sharded weights."""

    @abstractmethod
    def _local_slots(self) -> dict[str, TensorOrShard]:
        """This replica's shards of the optimizer state by name, in the shapes of the weights' shards."""

    @contextlib.contextmanager
    def _gather_on_read(self) -> Iterator[None]:
        """Context for one forward pass, whether weights are sharded or not."""
        if self.weights is None or self.weights.is_unsharded:
            yield
            return
        self.weights.free_gathered()
        with self._gathering(self.weights):
            yield
        self.weights.end_forward()

    def sections(self) -> dict[StateKind, Section]:
        """State by kind: shards of weights and optimizer state; all weights while they are unsharded."""
        return super().sections() | {
            "trainable": Section(self._local_weights, self._write_weight),
            "optimizer": Section(self._local_slots, self.write_optimizer_slot),
        }

    def _local_weights(self) -> dict[str, TensorOrShard]:
        return {**self.trainable} if self.weights is None else self.weights.local_tensors()

    def _write_weight(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a weight by a value of its unsharded shape or of this replica's shard."""
        self.sharded_weights.write(name, value)
