"""Base class of the trainers of one part of a tensor-parallel replica, Keras or native."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from isotrain.adapters.torch.base.tensors import (
    TensorOrShard,
    TensorShard,
    overwrite,
    shard_slices,
)
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.adapters.torch.trainer.state import Section
from isotrain.plugin import IsotrainError, StateKind, unknown_name


class TensorParallelTrainer(ReplicaTrainer):
    """Trainer of a model, of some weights of which this process has a part.

    Attributes:
        cut_notes: Lines for the plan on what is cut; none before `cut`.
    """

    cut_notes: Sequence[str] = ()
    _communicator: PipelineCommunicator
    _cut_weights: Mapping[int, TensorShard] = MappingProxyType({})
    _gathered: Mapping[str, torch.Tensor] = MappingProxyType({})

    @abstractmethod
    def cut(
        self, communicator: PipelineCommunicator, layers: Sequence[str] | Mapping[str, str]
    ) -> None:
        """Keeps this process's part of the weights of some layers, and optimizer state for it. Collective.

        Args:
            communicator: Communicator with the other parts of the replica, which have the same weights.
            layers: The layers, as `TensorParallelBackend.start_tensor_parallel` gets them.

        Raises:
            SpecError: There is nothing to cut, or a layer cannot be cut so.
        """

    def check_cuts(self, inputs: Any) -> None:
        """Compares the model with the uncut one on a micro-batch, where a rule cannot tell. Collective."""
        return

    @property
    def is_gathered(self) -> bool:
        """Whether this process also has all weights, for reading."""
        return bool(self._gathered)

    def gather(self) -> None:
        """Gathers the weights that are cut, for reading; steps go on with parts. Collective."""
        names = list(self.trainable)
        gathered = {}
        for index, shard in self._cut_weights.items():
            whole = shard.local.detach().new_zeros(shard.shape)
            whole[shard_slices(shard)] = shard.local.detach()
            gathered[names[index]] = self._communicator.sum_in_replica(whole)
        self._gathered = gathered

    def forget_gathered(self) -> None:
        """Frees what `gather` has gathered. Local."""
        self._gathered = {}

    def norms(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """L2 norms, scalars, of whole tensors, from parts cut as the trainable weights are. Collective."""
        return self._norms_of(tensors, range(len(tensors)))

    def _norms_of(
        self, tensors: Sequence[torch.Tensor], indices: Sequence[int]
    ) -> list[torch.Tensor]:
        """Norms as of `norms`; `indices` are those of the weights that are cut like the tensors."""
        counts = self._communicator.topology.process == 0
        squares = torch.stack([each.square().sum() for each in tensors])
        kept = [counts or index in self._cut_weights for index in indices]
        total = self._communicator.sum_in_replica(squares * squares.new_tensor(kept))
        return list(total.sqrt().unbind())

    def sections(self) -> dict[StateKind, Section]:
        """State by kind; of weights that are cut, and of their optimizer state, this process's part."""
        return super().sections() | {
            "trainable": Section(self._read_weights, self._write_weight),
            "optimizer": Section(self._read_slots, self.write_optimizer_slot),
        }

    def _local_weights(self) -> dict[str, TensorOrShard]:
        named = enumerate(self.trainable.items())
        return {name: self._cut_weights.get(index, weight) for index, (name, weight) in named}

    def _read_weights(self) -> dict[str, TensorOrShard]:
        """All weights if they are gathered, else this process's parts."""
        return self._local_weights() | dict(self._gathered)

    def _write_weight(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a weight by a value of its whole shape, or of this process's part."""
        weights = self._local_weights()
        if name not in weights:
            raise IsotrainError(unknown_name("state", name, weights))
        overwrite(name, weights[name], value)
        if name in self._gathered:
            overwrite(name, self._gathered[name], value)

    @abstractmethod
    def _read_slots(self) -> dict[str, TensorOrShard]:
        """Optimizer state by name, marked as a part where its weight is cut."""

    def _as_part(self, slot: torch.Tensor, index: int) -> TensorOrShard:
        """A slot's value, marked as a part if the weight with this index is cut; any shape."""
        shard = self._cut_weights.get(index)
        if shard is None or slot.shape != shard.local.shape:
            return slot
        return TensorShard(slot, shard.shape, shard.offset)
