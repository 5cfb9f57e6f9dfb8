"""Splits a native torch model that applies modules one after the other into chunks, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common.pipeline.checks import MASKED_LOSS
from isotrain.adapters.common.pipeline.sequential import (
    Call,
    Modules,
    SequentialChunk,
    SequentialModel,
)
from isotrain.adapters.common.pipeline.split_model import (
    PipelineLosses,
    PipelineModel,
    no_comparison_needed,
)
from isotrain.adapters.torch.base.without_values import lacks_values
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.adapters.torch.trainer.native import NativeTrainer
from isotrain.plugin import PipelineSplit, TrainingSpec, UnsupportedError


def split_model(
    trainer: ReplicaTrainer, spec: TrainingSpec, split: PipelineSplit
) -> tuple[PipelineModel, PipelineLosses, Callable[[Any], None]]:
    """Splits the model of a trainer into chunks.

    Returns:
        The split model; its losses; and a function of a slice's inputs, to be called while all weights are
        here, that raises a SpecError if the model does not compute what its chunks compute.

    Raises:
        SpecError: The model does not have the layers at which to cut.
        UnsupportedError: The model cannot be split, or a layer would be on both sides of a cut.
    """
    if isinstance(trainer, NativeTrainer):
        modules = PipelineModules(trainer, split)
        return modules, modules, modules.check_equivalence
    from isotrain.adapters.keras.pipeline import KerasPipelineLoss, KerasPipelineModel
    from isotrain.adapters.torch.trainer.keras import KerasTrainer

    assert isinstance(trainer, KerasTrainer), "a trainer is native or of Keras"
    model = KerasPipelineModel(trainer.model, split.chunks, split.first_layers)
    return model, KerasPipelineLoss(spec, model, trainer.losses["train"]), no_comparison_needed


class PipelineModules(SequentialModel):
    """Split model of torch modules that are applied one after the other, and its losses."""

    sequential_class = "a torch.nn.Sequential"

    def __init__(self, trainer: NativeTrainer, split: PipelineSplit) -> None:
        """Splits the model of a trainer.

        Args:
            trainer: Trainer of the model.
            split: Split of the model into chunks.

        Raises:
            SpecError: The modules do not exist, are too few, or do not have all weights.
            UnsupportedError: It is no sequence of modules, or a module would be on both sides of a cut.
        """
        self._trainer = trainer
        super().__init__(trainer.model, split)

    def _submodules(self) -> Modules:
        return [each for each in self.model.named_modules(remove_duplicate=False) if each[0]]

    def _sequence(self) -> Modules | None:
        if type(self.model).forward is not nn.Sequential.forward:
            return None
        return [(name, module) for name, module in self._submodules() if "." not in name]

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights: Iterable[tuple[str, torch.Tensor]] = self.model.named_parameters()
        return weights

    def _variables(self, module: nn.Module) -> list[torch.Tensor]:
        return [*module.parameters(), *module.buffers()]

    def _trained(self, module: nn.Module) -> Sequence[torch.Tensor]:
        return [each for each in module.parameters() if each.requires_grad]

    def _call_of(self, modules: Modules) -> Call:
        """Function that applies modules in order; the mode is that of the whole model, not `training`."""

        def compute(tensor: Any) -> Any:
            for _, module in modules:
                tensor = module(tensor)
            return tensor

        with_autocast = self._trainer.with_autocast(compute)
        return lambda tensor, training: with_autocast(tensor)

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def _is_equivalent(self, inputs: Any) -> bool:
        model = self._trainer.with_autocast(self.model)

        def compute_both() -> tuple[Any, Any]:
            return model(inputs), self.run_sequentially(inputs)

        expected, actual = self._trainer.call_in_eval_mode(compute_both)
        return (
            isinstance(expected, torch.Tensor)
            and isinstance(actual, torch.Tensor)
            and expected.shape == actual.shape
            and (
                lacks_values(expected)
                or lacks_values(actual)
                or torch.allclose(expected, actual, equal_nan=True)
            )
        )

    def of(
        self, chunk: SequentialChunk, tensors: Mapping[int, Any], targets: Any
    ) -> tuple[torch.Tensor, Any]:
        """Mean loss, a scalar, and predictions of the last chunk; 0 and None for other chunks.

        Args:
            chunk: Chunk that was computed.
            tensors: Tensors computed so far, by the number of the chunk that takes them.
            targets: Targets of the slice.

        Raises:
            UnsupportedError: The loss has its own denominator.
        """
        if chunk is not self.chunks[-1]:
            return torch.zeros(()), None
        predictions = tensors[len(self.chunks)]
        loss = self._trainer.loss_of(targets, predictions)
        if loss.dim() == 1 and not loss[1]:  # without padding after all
            loss = loss[0]
        if loss.dim():
            raise UnsupportedError(MASKED_LOSS)
        return loss, predictions
