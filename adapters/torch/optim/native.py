"""Torch optimizers of native models, built from the spec, and the clipping of their gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common.spec_components import (
    call_checked,
    names_option,
    resolve_for_framework,
)
from isotrain.adapters.torch.optim.lamb import Lamb
from isotrain.adapters.torch.optim.lion import Lion
from isotrain.adapters.torch.optim.muon import Muon
from isotrain.adapters.torch.optim.nadam import Nadam
from isotrain.plugin import CustomOptimizer, SpecError, TrainingSpec, WeightGroup

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lamb": Lamb,
    "lion": Lion,
    "muon": Muon,
    "nadam": Nadam,
    "radam": functools.partial(torch.optim.RAdam, decoupled_weight_decay=True),
}
_TORCH_NAMES = {"epsilon": "eps", "rho": "alpha"}
_SPEC_ONLY_FIELDS = ("name", "groups", "layer_decay")


def build_optimizer(
    spec: TrainingSpec,
    parameters: list[nn.Parameter],
    groups: Sequence[WeightGroup] = (),
    names: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """Builds the torch optimizer that the spec names, or the user's custom one.

    Args:
        spec: Training spec with the optimizer.
        parameters: Parameters, any shape.
        groups: Groups of the parameters; without any, all have the options of the spec's optimizer.
        names: Names of the parameters, for a custom optimizer.

    Raises:
        SpecError: The custom optimizer is no torch.optim.Optimizer, or needs a closure in float16.
    """
    settings = spec.optimizer
    if isinstance(settings, CustomOptimizer):
        factory = resolve_for_framework(settings.custom, "torch", "optimizer.custom")
        form, args = "(parameters, learning_rate, **args)", (parameters, settings.lr)
        options = {**names_option(factory, names), **settings.args}
        optimizer = call_checked(form, factory, "optimizer.custom", *args, **options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"optimizer.custom: it returned {type(optimizer).__name__!r}; for a torch module it"
                f" must return a torch.optim.Optimizer, from {form}."
            )
        if needs_closure(optimizer) and spec.loss_scaling is not None:
            raise SpecError(
                f"optimizer.custom: {type(optimizer).__name__} computes the loss several times in a step, and"
                " compares the losses; precision float16 scales them. Use bfloat16 or float32."
            )
        return optimizer
    options = {name: value for name, value in settings if name not in _SPEC_ONLY_FIELDS}
    param_groups = [
        {
            "params": [parameters[index] for index in group.indices],
            **_torch_options({**options, **group.options}),
            "lr": settings.lr * group.lr_factor,
        }
        for group in groups
    ]
    optimizer = _OPTIMIZERS[settings.name](param_groups or parameters, **_torch_options(options))
    if isinstance(optimizer, torch.optim.Adagrad):  # which starts all sums alike
        for group in optimizer.param_groups:
            for weight in group["params"]:
                optimizer.state[weight]["sum"].fill_(group["initial_accumulator_value"])
    return optimizer


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` needs a closure, with which it computes the loss several times, as L-BFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _torch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the spec under the names that torch gives them."""
    renamed = {_TORCH_NAMES.get(name, name): value for name, value in options.items()}
    if "beta_1" in renamed:
        renamed["betas"] = (renamed.pop("beta_1"), renamed.pop("beta_2"))
    return renamed


def clip_gradients(parameters: Iterable[nn.Parameter], clip: Any) -> None:
    """Clips gradients in place: by value, or by norm or global norm (Pascanu et al. 2013); any shapes."""
    parameters = list(parameters)
    if clip.value is not None:
        nn.utils.clip_grad_value_(parameters, clip.value)
    elif clip.global_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip.global_norm)
    else:
        for parameter in parameters:
            nn.utils.clip_grad_norm_(parameter, clip.norm)


def clip_shards(
    shards: Sequence[nn.Parameter],
    clip: Any,
    norms: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> None:
    """Clips the gradients of shards in place, by the norms of the full gradients. Collective.

    Args:
        shards: Shards of weights, with gradients.
        clip: Clipping of the spec.
        norms: Function that returns the L2 norms (scalars) of full tensors, from their shards.
    """
    if clip.value is not None:
        clip_gradients(shards, clip)
        return
    measured = norms([shard.grad for shard in shards])
    if clip.global_norm is not None:
        norm = torch.linalg.vector_norm(torch.stack([*measured]))
        nn.utils.clip_grads_with_norm_(shards, clip.global_norm, norm)
        return
    for shard, norm in zip(shards, measured, strict=True):
        nn.utils.clip_grads_with_norm_([shard], clip.norm, norm)
