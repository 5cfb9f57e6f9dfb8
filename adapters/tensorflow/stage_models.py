"""Which models TensorFlow computes in stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from isotrain.adapters import keras_private
from isotrain.adapters.keras_stages import StagedModel, StageLoss
from isotrain.adapters.stage_models import StageLosses, StageModel, by_its_graph
from isotrain.adapters.tensorflow.program import Program
from isotrain.adapters.tensorflow.stage_modules import StagedModules
from isotrain.plugin import ModelCut, TrainingSpec


def cut_model(
    program: Program, spec: TrainingSpec, cut: ModelCut
) -> tuple[StageModel, StageLosses, Callable[[Any], None]]:
    """Cuts the model of a program.

    Returns:
        It, its losses, and what is told the inputs of a slice: it refuses a model that does not compute what
        its chunks do.

    Raises:
        SpecError: It cannot be cut so.
        UnsupportedError: It cannot be cut, or a layer would be on both sides of a cut.
    """
    if _is_listed(program.model, spec, cut):
        modules = StagedModules(program, spec, cut)
        return modules, modules, modules.compare
    model = StagedModel(program.model, cut.chunks, cut.first)
    return model, StageLoss(spec, model, program.losses["train"]), by_its_graph


def _is_listed(model: Any, spec: TrainingSpec, cut: ModelCut) -> bool:
    """Whether it is cut between modules, and not by its graph: native, and says so or has no graph."""
    if not isinstance(model, keras.Layer):
        return True
    has_graph = isinstance(model, keras.Sequential) or keras_private.is_functional(model)
    says_so = bool(cut.modules) or hasattr(model, "pipeline_modules")
    return isinstance(spec.model, Mapping) and (says_so or not has_graph)
