"""Which models torch computes in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isotrain.adapters.stage_models import PipelineLosses, PipelineModel, no_comparison_needed
from isotrain.adapters.torch.native_program import NativeTrainer
from isotrain.adapters.torch.program import ReplicaTrainer
from isotrain.plugin import PipelineSplit, TrainingSpec


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
        from isotrain.adapters.torch.stage_modules import PipelineModules

        modules = PipelineModules(trainer, cut)
        return modules, modules, modules.check_equivalence
    from isotrain.adapters.keras_stages import KerasPipelineModel, KerasPipelineLoss
    from isotrain.adapters.torch.keras_program import KerasTrainer

    assert isinstance(trainer, KerasTrainer), "a program is of one kind or the other"
    model = KerasPipelineModel(trainer.model, cut.chunks, cut.first)
    return model, KerasPipelineLoss(spec, model, trainer.losses["train"]), no_comparison_needed
