"""Builds the trainer of a fully sharded model; imports Keras only for a portable model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.torch.sharded.native import ShardedNativeTrainer
from isotrain.adapters.torch.sharded.trainer import ShardedTrainer
from isotrain.adapters.torch.trainer.build import build_model
from isotrain.plugin import SpecError, TrainingSpec


def build_sharded(spec: TrainingSpec, device: torch.device) -> ShardedTrainer:
    """Builds the spec's model on this process's device; its weights are not sharded yet.

    Raises:
        SpecError: The model function returned neither a Keras model nor, for a model of torch, a module.
    """
    model = build_model(spec, device)
    if keras_backend.is_keras_instance(model, "Layer"):
        from isotrain.adapters.torch.sharded.keras import ShardedKerasTrainer

        return ShardedKerasTrainer(spec, model)
    if isinstance(model, nn.Module) and isinstance(spec.model, Mapping):
        return ShardedNativeTrainer(spec, model, device)
    raise SpecError(
        f"model: the function returned {type(model).__name__!r}; with stage=3, strategy sharded takes Keras"
        " models, and native torch modules that the spec declares as such: `model: {torch: ...}`."
    )
