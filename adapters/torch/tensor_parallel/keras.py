"""Trainer of one part of a tensor-parallel replica of a portable (Keras) model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.tensor_parallel import find_cuts, part_bounds
from isotrain.adapters.torch.base.tensors import TensorOrShard, TensorShard, overwrite
from isotrain.adapters.torch.graph.trace import Compute
from isotrain.adapters.torch.optim.keras_foreach import keras_update
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.tensor_parallel.parts import TorchParts
from isotrain.adapters.torch.tensor_parallel.trainer import TensorParallelTrainer
from isotrain.adapters.torch.trainer.keras import KerasTrainer
from isotrain.plugin import IsotrainError, TrainingSpec, UnsupportedError, unknown_name


class KerasTensorParallelTrainer(TensorParallelTrainer, KerasTrainer):
    """Trainer of a Keras model whose layers are cut by a rule."""

    _slot_weights: Mapping[int, int] = MappingProxyType({})

    def cut(
        self, communicator: PipelineCommunicator, layers: Sequence[str] | Mapping[str, str]
    ) -> None:
        parts = TorchParts(communicator)
        self._communicator = communicator
        cuts = find_cuts(self.model, parts.degree, layers)
        axes = {id(variable): axis for each in cuts for variable, axis in each.axes}
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
        for each in cuts:
            each.apply(parts)
        self.cut_notes = [each.describe() for each in cuts]
        self._cut_weights = cut_weights
        self._build_optimizer(self.optimizer.name)

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

    def _read_slots(self) -> dict[str, TensorOrShard]:
        return {
            name: self._as_part(slot.value, self._slot_weights.get(id(slot), -1))
            for name, slot in self._slots().items()
        }

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        slots = self._read_slots()
        if name not in slots:
            raise IsotrainError(unknown_name("optimizer slot", name, slots))
        overwrite(f"optimizer/{name}", slots[name], value)
        if self.update is not None:
            self.update.forget()
