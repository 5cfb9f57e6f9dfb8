"""What the modules of a native torch model do that bears on whether runs agree."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from isotrain.adapters.torch.base import private_api
from isotrain.plugin import LayerTrait, Trait

_FOR_LIGHTNING = ("training_step", "validation_step", "configure_optimizers")


def model_traits(model: nn.Module) -> list[LayerTrait]:
    """Lists the traits of a model; what its `forward` calls as plain functions is not seen."""
    found = [
        LayerTrait(trait, name or "model", type(module).__name__)
        for name, module in model.named_modules()
        for trait in _of_module(module)
    ]
    kind = type(model).__name__
    own = (name for name in _FOR_LIGHTNING if callable(getattr(model, name, None)))
    return found + [LayerTrait(Trait.CUSTOM_TRAINING, name, kind) for name in own]


def _of_module(module: nn.Module) -> Iterator[Trait]:
    if isinstance(module, nn.SyncBatchNorm):
        yield Trait.GLOBAL_STATISTICS
    elif private_api.is_batch_norm(module):
        yield Trait.LOCAL_STATISTICS
    if _draws(module):
        yield Trait.RANDOM


def _draws(module: nn.Module) -> bool:
    if private_api.is_dropout(module):
        return True
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)
