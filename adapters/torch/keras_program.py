"""A portable (Keras 3) model on torch."""

from __future__ import annotations

from typing import Any

import keras
import torch

from isotrain.adapters import portable
from isotrain.adapters.torch.program import Objective, Program, overwrite
from isotrain.core.errors import IsotrainError, unknown_name
from isotrain.core.spec import TrainingSpec

_SEED_STRIDE = 0x9E3779B1
"""Odd, so that adding multiples of it to a 32-bit seed keeps replicas' seeds apart."""


class KerasProgram(Program):
    """Drives a Keras model with its Keras optimizer, eagerly."""

    def __init__(self, spec: TrainingSpec, model: keras.Model) -> None:
        self.model = model
        self._variables = list(model.trainable_variables)
        self._others = list(model.non_trainable_variables)
        names = portable.canonical_names(self._variables + self._others)
        tensors = [variable.value for variable in self._variables + self._others]
        count = len(self._variables)
        self.trainable = dict(zip(names[:count], tensors[:count], strict=True))
        self.frozen = dict(zip(names[count:], tensors[count:], strict=True))
        self._parameters = tensors[:count]
        self._optimizer = portable.build_optimizer(spec, "torch")
        self._optimizer.build(self._variables)
        self._scales_loss = isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer)
        self._evaluation = portable.loss_computer(spec, model, "torch", training=False)
        training = portable.loss_computer(spec, model, "torch", training=True)
        self.objective = Objective(model, training)

    def zero_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def evaluate(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        with torch.no_grad():
            return self._evaluation(inputs, targets)

    def backward(self, loss: torch.Tensor) -> None:
        if self._scales_loss:
            loss = self._optimizer.scale_loss(loss)
        loss.backward()

    def set_learning_rate(self, rate: float) -> None:
        optimizer = self._optimizer.inner_optimizer if self._scales_loss else self._optimizer
        optimizer.learning_rate.assign(rate)

    def apply(self) -> None:
        with torch.no_grad():
            gradients = [parameter.grad for parameter in self._parameters]
            self._optimizer.apply(gradients, self._variables)

    def distinguish(self, replica: int) -> None:
        for variable in self._others:
            if variable.path.endswith("seed_generator_state") and replica:
                state = keras.ops.convert_to_numpy(variable.value).copy()
                state[0] = (int(state[0]) + replica * _SEED_STRIDE) & 0x7FFFFFFF
                variable.assign(state)

    def _slots(self) -> dict[str, Any]:
        variables = self._optimizer.variables
        return dict(zip(portable.canonical_names(variables), variables, strict=True))

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return {name: variable.value for name, variable in self._slots().items()}

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        slots = self._slots()
        if name not in slots:
            raise IsotrainError(unknown_name("optimizer slot", name, slots))
        overwrite(f"optimizer/{name}", slots[name].value, value)
