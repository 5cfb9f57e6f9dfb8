"""Traits of a native torch model's modules that can make runs differ."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from isotrain.adapters.torch.base import private_api
from isotrain.plugin import LayerTrait, Trait

_LIGHTNING_METHODS = ("training_step", "validation_step", "configure_optimizers")


def model_traits(model: nn.Module) -> list[LayerTrait]:
    """Traits of a model's modules; plain functions that `forward` calls are not inspected."""
    traits = [
        LayerTrait(trait, name or "model", type(module).__name__)
        for name, module in model.named_modules()
        for trait in _module_traits(module)
    ]
    class_name = type(model).__name__
    methods = (name for name in _LIGHTNING_METHODS if callable(getattr(model, name, None)))
    return traits + [LayerTrait(Trait.CUSTOM_TRAINING, name, class_name) for name in methods]


def _module_traits(module: nn.Module) -> Iterator[Trait]:
    if isinstance(module, nn.SyncBatchNorm):
        yield Trait.GLOBAL_STATISTICS
    elif private_api.is_batch_norm(module):
        yield Trait.LOCAL_STATISTICS
    if _is_random(module):
        yield Trait.RANDOM


def _is_random(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training."""
    if private_api.is_dropout(module):
        return True
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)
