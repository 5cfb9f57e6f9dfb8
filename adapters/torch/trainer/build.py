"""Builds the trainer of a spec's model; imports Keras only for a portable model."""

from __future__ import annotations

import random as python_random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common import spec_components
from isotrain.adapters.common.objective import frozen_specs
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.torch.base.without_values import WithoutValues
from isotrain.adapters.torch.trainer.base import ReplicaTrainer, UpdateSwitch
from isotrain.adapters.torch.trainer.modules import (
    ModelDict,
    require_separate_memory,
    without_wrappers,
)
from isotrain.adapters.torch.trainer.native import NativeTrainer
from isotrain.plugin import FrozenModel, SpecError, TrainingSpec


def build_model(spec: TrainingSpec) -> Any:
    """Calls the spec's model function, with the spec's seed.

    A torch module draws its initial weights on the CPU: a seed gives the same ones whatever device trains
    them. Its weights have the names that they have without `torch.compile` and `DataParallel`.

    Raises:
        SpecError: Two parameters of a torch module share memory.
    """
    function = spec_components.resolve_for_framework(spec.model, "torch", "model")
    model = _build_seeded(spec, function)
    if isinstance(model, dict):
        models = {name: without_wrappers(each) for name, each in model.items()}
        modules = {name: each for name, each in models.items() if isinstance(each, nn.Module)}
        require_separate_memory(nn.ModuleDict(modules))
        return models
    model = without_wrappers(model)
    if isinstance(model, nn.Module):
        require_separate_memory(model)
    return model


def build_frozen(spec: TrainingSpec, device: torch.device) -> dict[str, Callable[..., Any]]:
    """Builds the spec's frozen models, in evaluation mode and without gradients of weights, by name."""
    return {each.name: _frozen(each, its_spec, device) for each, its_spec in frozen_specs(spec)}


def _frozen(frozen: FrozenModel, spec: TrainingSpec, device: torch.device) -> Callable[..., Any]:
    model = build_model(spec)
    if keras_backend.is_keras_instance(model, "Layer"):
        from isotrain.adapters.keras import model as keras_model

        return keras_model.freeze_model(model, frozen)
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"frozen: expected a torch.nn.Module or a Keras model, received {type(model).__name__!r}."
        )
    module = model.to(device).requires_grad_(False).eval()
    if spec.precision == "float64":
        module = module.double()
    variables = dict(module.named_parameters()) | dict(module.named_buffers())
    frozen.load(variables, lambda tensor, array: tensor.copy_(torch.from_numpy(array)))
    return module


def build_trainer(spec: TrainingSpec, device: torch.device) -> ReplicaTrainer:
    """Builds the spec's model on this process's device.

    Raises:
        SpecError: The model function returned neither a Keras model nor a `torch.nn.Module`, or a module of
            TorchScript.
    """
    frozen = build_frozen(spec, device)  # before the model: it draws random numbers as without them
    model = build_model(spec)
    if isinstance(model, dict):
        model = ModelDict(model)
    if keras_backend.is_keras_instance(model, "Layer"):
        from isotrain.adapters.torch.trainer.keras import KerasTrainer

        return KerasTrainer(spec, model, frozen)
    if isinstance(model, nn.Module):
        _require_no_script(model)
        return NativeTrainer(spec, model, device, frozen)
    raise SpecError(
        f"model: the function returned {type(model).__name__!r}; a torch backend trains a"
        " torch.nn.Module, a Keras model, or a dict of such."
    )


def _require_no_script(model: nn.Module) -> None:
    """Refuses modules of TorchScript, whose forward passes cannot be observed.

    Raises:
        SpecError: There is one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SpecError(
                f"model: {name or 'it'} is a {type(module).__name__} of TorchScript, which takes no hooks."
                " Return the torch.nn.Module that it was made of; `compile: true` makes its steps faster."
            )


def build_trainers(spec: TrainingSpec, device: torch.device) -> dict[str, ReplicaTrainer]:
    """Builds the spec's model on this process's device, and a trainer for each of its named updates."""
    whole = build_trainer(spec, device)
    switch = UpdateSwitch(whole.trainable.values())
    trainers = {
        update: whole.for_update(spec.for_update(update), names)
        for update, names in spec.weights_by_update(whole.trainable.keys()).items()
    }
    for update, trainer in trainers.items():
        trainer.switch = switch
        trainer.step.draw_for(update)
    return trainers


def _build_seeded(spec: TrainingSpec, function: Callable[..., Any]) -> Any:
    """Calls the model function with random numbers that depend on the seed alone.

    Keras is set up before it builds a model. A function that imports Keras only inside its body is therefore
    called again.
    """
    if "keras" not in sys.modules:
        model = _call_seeded(spec, function)
        if "keras" not in sys.modules:
            return model
    from isotrain.adapters.keras import model as keras_model
    from isotrain.adapters.keras import private as keras_private
    from isotrain.adapters.torch.base.binary_cross_entropy import probability_loss
    from isotrain.adapters.torch.base.recompute import recomputed
    from isotrain.adapters.torch.base.require_all import require_all
    from isotrain.adapters.torch.loss.functional import class_loss

    keras_private.set_probability_loss(probability_loss)
    keras_private.set_class_loss(class_loss)
    keras_private.refuse_wrong_classes(require_all)
    torch.manual_seed(spec.seed)
    return keras_model.build_model(
        spec, "torch", recomputed=recomputed, has_values=WithoutValues.entered is None
    )


def _call_seeded(spec: TrainingSpec, function: Callable[..., Any]) -> Any:
    state = python_random.getstate()
    python_random.seed(spec.seed)
    torch.manual_seed(spec.seed)
    try:
        return function(**spec.model_args)
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise SpecError(
            "model: the function imports Keras, which is not installed. Install it (pip install keras), or"
            " give a function that returns a torch.nn.Module, which does not need it."
        ) from error
    finally:
        python_random.setstate(state)
