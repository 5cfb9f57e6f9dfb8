"""Which models torch computes in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isotrain.adapters.stage_models import StageLosses, StageModel, by_its_graph
from isotrain.adapters.torch.native_program import NativeProgram
from isotrain.adapters.torch.program import Program
from isotrain.plugin import ModelCut, TrainingSpec


def cut_model(
    program: Program, spec: TrainingSpec, cut: ModelCut
) -> tuple[StageModel, StageLosses, Callable[[Any], None]]:
    """Cuts the model of a program.

    Returns:
        It, its losses, and what is told the inputs of a slice while all weights are here: it refuses a model
        that does not compute what its chunks do.

    Raises:
        SpecError: It cannot be cut so.
        UnsupportedError: It cannot be cut, or a layer would be on both sides of a cut.
    """
    if isinstance(program, NativeProgram):
        from isotrain.adapters.torch.stage_modules import StagedModules

        modules = StagedModules(program, cut)
        return modules, modules, modules.compare
    from isotrain.adapters.keras_stages import StagedModel, StageLoss
    from isotrain.adapters.torch.keras_program import KerasProgram

    assert isinstance(program, KerasProgram), "a program is of one kind or the other"
    model = StagedModel(program.model, cut.chunks, cut.first)
    return model, StageLoss(spec, model, program.losses["train"]), by_its_graph
