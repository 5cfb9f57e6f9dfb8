"""What is alike in torch programs of which each replica keeps a part of every weight and slot."""

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
    """Computes with weights that are joined as they are read.

    Attributes:
        weights: They, once they are taken apart.
    """

    weights: ShardedWeights | None = None

    @property
    def sharded_weights(self) -> ShardedWeights:
        """The weights in parts."""
        assert self.weights is not None, "they were taken apart at the start"
        return self.weights

    @abstractmethod
    def shard_weights(self, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int) -> None:
        """Keeps the own part of each weight from now on, and slots for it alone.

        Args:
            communicator: Ties this replica to the others, which have the same weights.
            mesh: How parts lie over the replicas.
            unit_bytes: Of weights that are joined together, but for layers that have more.

        Raises:
            SpecError: The model has weights that cannot be.
        """

    @abstractmethod
    def _joining(self, weights: ShardedWeights) -> AbstractContextManager[None]:
        """Within it, a forward pass reads weights that lie in parts."""

    @abstractmethod
    def _slots_here(self) -> dict[str, TensorOrShard]:
        """What this replica has of the optimizer's slots, by name."""

    @contextlib.contextmanager
    def _gather_on_read(self) -> Iterator[None]:
        """Within it is one forward pass, wherever its weights are."""
        if self.weights is None or self.weights.is_unsharded:
            yield
            return
        self.weights.forget()
        with self._joining(self.weights):
            yield
        self.weights.end_forward()

    def sections(self) -> dict[StateKind, Section]:
        """The state that it has itself: its parts of weights and slots; all weights, while they are here."""
        return super().sections() | {
            "trainable": Section(self._weights_here, self._write_weight),
            "optimizer": Section(self._slots_here, self.write_optimizer_slot),
        }

    def _weights_here(self) -> dict[str, TensorOrShard]:
        return {**self.trainable} if self.weights is None else self.weights.local_tensors()

    def _write_weight(self, name: str, value: torch.Tensor) -> None:
        self.sharded_weights.write(name, value)
