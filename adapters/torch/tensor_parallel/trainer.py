"""Trainer of one part of a tensor-parallel replica of a portable (Keras) model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.tensor_parallel import Cut, find_cuts, part_bounds
from isotrain.adapters.torch.base.tensors import (
    TensorOrShard,
    TensorShard,
    overwrite,
    shard_slices,
)
from isotrain.adapters.torch.graph.trace import Compute
from isotrain.adapters.torch.optim.keras_foreach import keras_update
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.tensor_parallel.parts import TorchParts
from isotrain.adapters.torch.trainer.keras import KerasTrainer
from isotrain.adapters.torch.trainer.state import Section
from isotrain.plugin import IsotrainError, StateKind, TrainingSpec, UnsupportedError, unknown_name


class TensorParallelTrainer(KerasTrainer):
    """Trainer of a Keras model, of some weights of which this process has a part.

    Attributes:
        cuts: Layers that are cut; empty before `cut`.
    """

    cuts: Sequence[Cut] = ()
    _communicator: PipelineCommunicator
    _cut_weights: Mapping[int, TensorShard] = MappingProxyType({})
    _slot_weights: Mapping[int, int] = MappingProxyType({})
    _gathered: Mapping[str, torch.Tensor] = MappingProxyType({})

    def cut(self, communicator: PipelineCommunicator, layers: Sequence[str]) -> None:
        """Keeps this process's part of the weights of some layers, and optimizer state for it. Local.

        Args:
            communicator: Communicator with the other parts of the replica, which have the same weights.
            layers: Names, or patterns of names, of the layers; empty for all that can be cut.

        Raises:
            SpecError: There is nothing to cut, or there are fewer units, heads or rows than parts.
        """
        parts = TorchParts(communicator)
        self._communicator = communicator
        self.cuts = find_cuts(self.model, parts.degree, layers)
        axes = {id(variable): axis for each in self.cuts for variable, axis in each.axes}
        cut_weights: dict[int, TensorShard] = {}
        for index, variable in enumerate(self._variables):
            if id(variable) not in axes:
                continue
            weight, axis = variable.value, axes[id(variable)]
            shape, (start, length) = weight.shape, part_bounds(weight.shape[axis], parts)
            weight.data = weight.detach().narrow(axis, start, length).clone()
            keras_private.set_shape(variable, weight.shape)
            offset = [start if each == axis else 0 for each in range(len(shape))]
            cut_weights[index] = TensorShard(weight, shape, offset)
        for each in self.cuts:
            each.apply(parts)
        self._cut_weights = cut_weights
        self._build_optimizer(self.optimizer.name)

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
        counts = self._communicator.topology.process == 0
        squares = torch.stack([each.square().sum() for each in tensors])
        kept = [counts or index in self._cut_weights for index in range(len(tensors))]
        total = self._communicator.sum_in_replica(squares * squares.new_tensor(kept))
        return list(total.sqrt().unbind())

    def _build_optimizer_state(self) -> None:
        """Builds the optimizer's state variables for this process's parts."""
        super()._build_optimizer_state()
        if not self._cut_weights:
            return
        variables = self._updated_variables
        self.update = keras_update(
            self._spec, self.optimizer, variables, self.norms, self._option_groups
        )
        if self.update is None:
            raise UnsupportedError(
                "strategy tensor: only Keras itself can update such weights (of several dtypes, or with"
                " constraints), and it has no norms of parts. Use strategy data-parallel."
            )
        self._slot_weights = {
            id(slot): index
            for slots in keras_private.slots_of(self.optimizer).values()
            for index, slot in enumerate(slots)
        }

    def _graph_cache(self, spec: TrainingSpec, training: bool) -> Compute:
        """The eager computation: layers that are cut communicate."""
        return self._make_loss_computer(spec, training)

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

    def _read_slots(self) -> dict[str, TensorOrShard]:
        return {name: self._local_slot(slot) for name, slot in self._slots().items()}

    def _local_slot(self, slot: Any) -> TensorOrShard:
        """A slot variable's value, marked as a part if its weight is cut; any shape."""
        value: torch.Tensor = slot.value
        shard = self._cut_weights.get(self._slot_weights.get(id(slot), -1))
        if shard is None or value.shape != shard.local.shape:
            return value
        return TensorShard(value, shard.shape, shard.offset)

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        slots = self._read_slots()
        if name not in slots:
            raise IsotrainError(unknown_name("optimizer slot", name, slots))
        overwrite(f"optimizer/{name}", slots[name], value)
        if self.update is not None:
            self.update.forget()
