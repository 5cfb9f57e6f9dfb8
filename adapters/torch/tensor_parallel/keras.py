"""Trainer of one part of a tensor-parallel replica of a portable (Keras) model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.metrics import inferred_accuracy
from isotrain.adapters.keras.model import LossComputer
from isotrain.adapters.keras.tensor_parallel.cuts import find_cuts, whole_logits_note
from isotrain.adapters.keras.tensor_parallel.logits import CutLogits
from isotrain.adapters.keras.tensor_parallel.logits_layer import LogitsLayer
from isotrain.adapters.keras.tensor_parallel.parts import part_bounds
from isotrain.adapters.keras.tensor_parallel.whole_logits import why_whole
from isotrain.adapters.torch.base.require_all import require_all
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
    _logits: CutLogits | None = None

    def cut(
        self, communicator: PipelineCommunicator, layers: Sequence[str] | Mapping[str, str]
    ) -> None:
        parts = TorchParts(communicator)
        self._communicator = communicator
        cuts = find_cuts(self.model, layers, parts, self._spec, "torch")
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
        notes = [] if layers else whole_logits_note(self.model, self._spec, "torch")
        self.cut_notes = [*(each.describe() for each in cuts), *notes]
        self._cut_logits(max(each.classes for each in cuts), parts)
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

    def _cut_logits(self, classes: int, parts: TorchParts) -> None:
        """Computes losses and metrics from this process's columns of logits of so many classes, if any."""
        if classes:
            logits = self._logits = CutLogits(self._spec, classes, parts, require_all)
            self._loss_computers |= {
                training: logits.compute(computer, self._spec, "torch")
                for training, computer in self._loss_computers.items()
            }

    def _take_update(self, spec: TrainingSpec, names: Collection[str]) -> None:
        self._loss_computers: dict[bool, LossComputer] = {}
        super()._take_update(spec, names)

    def _graph_cache(self, spec: TrainingSpec, training: bool) -> Compute:
        """The eager computation: layers that are cut communicate."""
        self._loss_computers[training] = self._make_loss_computer(spec, training)
        if not why_whole(spec, "torch") and LogitsLayer.of(self.model):
            for loss in self.losses["train" if training else "evaluation"].values():
                loss.accuracy = self._accuracy
        computers = self._loss_computers  # `cut` replaces those in it
        return lambda inputs, targets: computers[training](inputs, targets)

    def _accuracy(self, targets: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
        """Accuracy per sample or position, of predictions of any form that steps return. Collective."""
        accuracy = inferred_accuracy if self._logits is None else self._logits.accuracy
        values: torch.Tensor = accuracy(targets, predictions)
        return values

    def predict(self, inputs: Any) -> Any:
        predictions = super().predict(inputs)
        return predictions if self._logits is None else self._logits.gather(predictions)

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
