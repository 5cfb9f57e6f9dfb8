"""A native model of torch that applies modules one after the other, cut into chunks between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common.pipeline.checks import MASKED_LOSS
from isotrain.adapters.common.pipeline.interfaces import (
    PipelineLosses,
    PipelineModel,
    no_comparison_needed,
)
from isotrain.adapters.common.pipeline.sequential import (
    Call,
    Modules,
    SequentialChunk,
    SequentialModel,
)
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.adapters.torch.trainer.native import NativeTrainer
from isotrain.plugin import PipelineSplit, TrainingSpec, UnsupportedError


def split_model(
    trainer: ReplicaTrainer, spec: TrainingSpec, cut: PipelineSplit
) -> tuple[PipelineModel, PipelineLosses, Callable[[Any], None]]:
    """Cuts the model of a trainer.

    Returns:
        It, its losses, and what is told the inputs of a slice while all weights are here: it refuses a model
        that does not compute what its chunks do.

    Raises:
        SpecError: It cannot be cut so.
        UnsupportedError: It cannot be cut, or a layer would be on both sides of a cut.
    """
    if isinstance(trainer, NativeTrainer):
        modules = PipelineModules(trainer, cut)
        return modules, modules, modules.check_equivalence
    from isotrain.adapters.keras.pipeline import KerasPipelineLoss, KerasPipelineModel
    from isotrain.adapters.torch.trainer.keras import KerasTrainer

    assert isinstance(trainer, KerasTrainer), "a program is of one kind or the other"
    model = KerasPipelineModel(trainer.model, cut.chunks, cut.first)
    return model, KerasPipelineLoss(spec, model, trainer.losses["train"]), no_comparison_needed


class PipelineModules(SequentialModel):
    """Modules that a model applies one after the other, cut; and its losses."""

    sequential_class = "a torch.nn.Sequential"

    def __init__(self, trainer: NativeTrainer, cut: PipelineSplit) -> None:
        """Cuts a model.

        Raises:
            SpecError: There are no such modules, too few, or they do not have all weights.
            UnsupportedError: It is no sequence of modules, or a module would be on both sides of a cut.
        """
        self._trainer = trainer
        super().__init__(trainer.model, cut)

    def _inside(self) -> Modules:
        return [each for each in self.whole.named_modules(remove_duplicate=False) if each[0]]

    def _sequence(self) -> Modules | None:
        if type(self.whole).forward is not nn.Sequential.forward:
            return None
        return [(name, module) for name, module in self._inside() if "." not in name]

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        found: Iterable[tuple[str, torch.Tensor]] = self.whole.named_parameters()
        return found

    def _variables(self, module: nn.Module) -> list[torch.Tensor]:
        return [*module.parameters(), *module.buffers()]

    def _trained(self, module: nn.Module) -> Sequence[torch.Tensor]:
        return [each for each in module.parameters() if each.requires_grad]

    def _calling(self, modules: Modules) -> Call:
        """The model is in training mode, or not, as a whole."""

        def compute(given: Any) -> Any:
            for _, module in modules:
                given = module(given)
            return given

        computed = self._trainer.with_autocast(compute)
        return lambda given, training: computed(given)

    def _is_tensor(self, given: Any) -> bool:
        return isinstance(given, torch.Tensor)

    def _give_the_same(self, given: Any) -> bool:
        of_whole = self._trainer.with_autocast(self.whole)

        def both() -> tuple[Any, Any]:
            return of_whole(given), self.run_in_turn(given)

        whole, in_turn = self._trainer.call_in_eval_mode(both)
        return (
            isinstance(whole, torch.Tensor)
            and isinstance(in_turn, torch.Tensor)
            and whole.shape == in_turn.shape
            and torch.allclose(whole, in_turn, equal_nan=True)
        )

    def of(
        self, chunk: SequentialChunk, known: Mapping[int, Any], targets: Any
    ) -> tuple[torch.Tensor, Any]:
        """The mean loss of the last chunk, and its predictions; 0 of others.

        Raises:
            UnsupportedError: It counts targets by more than their number.
        """
        if chunk is not self.chunks[-1]:
            return torch.zeros(()), None
        predictions = known[len(self.chunks)]
        found = self._trainer.loss_of(targets, predictions)
        if found.dim() == 1 and not found[1]:  # without padding after all
            found = found[0]
        if found.dim():
            raise UnsupportedError(MASKED_LOSS)
        return found, predictions
