"""Which models TensorFlow computes in stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from isotrain.adapters import keras_private
from isotrain.adapters.keras_stages import KerasPipelineModel, KerasPipelineLoss
from isotrain.adapters.stage_models import PipelineLosses, PipelineModel, no_comparison_needed
from isotrain.adapters.tensorflow.program import ReplicaTrainer
from isotrain.adapters.tensorflow.stage_modules import PipelineModules
from isotrain.plugin import PipelineSplit, TrainingSpec


def split_model(
    trainer: ReplicaTrainer, spec: TrainingSpec, cut: PipelineSplit
) -> tuple[PipelineModel, PipelineLosses, Callable[[Any], None]]:
    """Cuts the model of a trainer.

    Returns:
        It, its losses, and what is told the inputs of a slice: it refuses a model that does not compute what
        its chunks do.

    Raises:
        SpecError: It cannot be cut so.
        UnsupportedError: It cannot be cut, or a layer would be on both sides of a cut.
    """
    if _is_listed(trainer.model, spec, cut):
        modules = PipelineModules(trainer, spec, cut)
        return modules, modules, modules.check_equivalence
    model = KerasPipelineModel(trainer.model, cut.chunks, cut.first)
    return model, KerasPipelineLoss(spec, model, trainer.losses["train"]), no_comparison_needed


def _is_listed(model: Any, spec: TrainingSpec, cut: PipelineSplit) -> bool:
    """Whether it is cut between modules, and not by its graph: native, and says so or has no graph."""
    if not isinstance(model, keras.Layer):
        return True
    has_graph = isinstance(model, keras.Sequential) or keras_private.is_functional(model)
    says_so = bool(cut.modules) or hasattr(model, "pipeline_modules")
    return isinstance(spec.model, Mapping) and (says_so or not has_graph)
