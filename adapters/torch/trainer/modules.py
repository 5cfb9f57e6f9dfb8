"""Modules of a native model: evaluation mode in training, frozen and tied weights, generators, and traits."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from isotrain.adapters.common.outputs import no_single_model_error
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.batch_norm import is_local
from isotrain.adapters.torch.base.tensors import share_elements
from isotrain.adapters.torch.base.without_values import lacks_values
from isotrain.plugin import LayerTrait, SpecError, Trait

_LIGHTNING_METHODS = ("training_step", "validation_step", "configure_optimizers")


class ModelDict(nn.ModuleDict):
    """Torch modules by name: what a model function that returns a dict gives."""

    def forward(self, inputs: Any) -> Any:
        """Refuses to choose one of the models."""
        raise no_single_model_error(self)


def without_wrappers(model: Any) -> Any:
    """A model without wrappers of `torch.compile` and `DataParallel`, which give its weights other names.

    A compiled module stays compiled, as by `nn.Module.compile`. `DataParallel` splits batches over the
    devices of one process, and each replica has one. What it has wrapped is its own `module`, as the forward
    pass of the model around it may call that.

    Args:
        model: What a model function returned; only torch modules are looked at.

    Raises:
        SpecError: What `DataParallel` has wrapped inside a model has a `module` itself.
    """
    if not isinstance(model, nn.Module):
        return model
    inner = private_api.compiled_module(model)
    if inner is None and isinstance(model, nn.DataParallel):
        inner = model.module
    if inner is not None:
        return without_wrappers(inner)
    for name, child in [*model.named_modules(remove_duplicate=False)]:
        is_child = bool(name) and "." not in name
        if is_child and (bare := without_wrappers(child)) is not child:
            if isinstance(child, nn.DataParallel):
                _add_module_attribute(name, bare)
            model.register_module(name, bare)
    return model


def _add_module_attribute(name: str, bare: nn.Module) -> None:
    """Lets a module that was wrapped be its own `module`, which is not one of its children."""
    if getattr(bare, "module", bare) is not bare:
        raise SpecError(
            f"model: {name!r} is a DataParallel around a {type(bare).__name__} that has an attribute `module`"
            " itself. Leave DataParallel out: each replica has one device."
        )
    vars(bare)["module"] = bare


class EvaluationModules:
    """Modules of a model that stay in evaluation mode in training: frozen ones, and those that came in it.

    Attributes:
        buffers: Buffers of the modules that the model function has left in evaluation mode.
    """

    def __init__(self, model: nn.Module, is_frozen: Callable[[str], bool]) -> None:
        """Freezes weights, and finds the modules.

        Args:
            model: Model as its function returned it.
            is_frozen: Whether a weight of this name is to be frozen.

        Raises:
            SpecError: A buffer is to be frozen, and another weight of its module is not.
        """
        self._model = model
        self._left, self._switched_to_train = _left_in_evaluation(model)
        self.freeze(is_frozen)
        self.buffers = [b for m in self._left.values() for b in m.buffers(recurse=False)]

    def freeze(self, is_frozen: Callable[[str], bool]) -> None:
        """Freezes weights by name; modules of which no weight is left stay in evaluation mode."""
        self._modules = [*(self._left | _freeze(self._model, is_frozen)).values()]

    def set_train_mode(self) -> None:
        """Sets the model to training mode, except for these modules."""
        self._model.train()
        for module in self._modules:
            module.training = False  # not its children, which `eval` would mean too

    def notes(self) -> list[str]:
        """Notes for the plan on modules that the model function has left in evaluation mode."""
        notes = []
        if self._switched_to_train:
            notes.append(
                f"model: {', '.join(_outermost(self._switched_to_train))}: built in evaluation mode, but"
                " trained in training mode, since its weights are trained; a part whose weights do not"
                " require gradients stays in evaluation mode"
            )
        if self._left:
            notes.append(
                f"model: {', '.join(_outermost(self._left))}: left in evaluation mode by the model"
                " function, and so in training too (no dropout, no batch statistics); call `train` there to"
                " change that"
            )
        return notes


def _left_in_evaluation(
    model: nn.Module,
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Finds the modules that a model function has left in evaluation mode.

    Returns:
        Two dicts of modules by name. The first stay in evaluation mode: none of their parameters requires
        gradients. The second are trained in training mode: they have weights to train, as a model of
        `from_pretrained` has; layers without weights, such as dropout, follow the module that contains them.
    """
    left: dict[str, nn.Module] = {}
    switched: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module, is_in_switched: bool) -> None:
        parameters = list(module.parameters())
        if module.training:
            is_in_switched = False
        elif any(parameter.requires_grad for parameter in parameters):
            switched[name], is_in_switched = module, True
        elif parameters or not is_in_switched:
            left[name], is_in_switched = module, False
        for child, inner in module.named_children():
            visit(f"{name}.{child}" if name else child, inner, is_in_switched)

    visit("", model, False)
    return left, switched


def _freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> dict[str, nn.Module]:
    """Freezes parameters by name.

    Returns:
        Modules that stay in evaluation mode, by name: those with frozen buffers, which training must not
        change; and those whose weights are all frozen, with all of their submodules.

    Raises:
        SpecError: A buffer is to be frozen, and another weight of its module is not.
    """
    eval_modules = {}
    for parent, module in model.named_modules():
        prefix = f"{parent}." if parent else ""
        parameters = [(prefix + name, p) for name, p in module.named_parameters(recurse=False)]
        for name, parameter in parameters:
            if is_frozen(name):
                parameter.requires_grad_(False)
        buffers = [prefix + name for name, _ in module.named_buffers(recurse=False)]
        frozen = [name for name in buffers if is_frozen(name)]
        if frozen and not all(is_frozen(name) for name in (*buffers, *dict(parameters))):
            raise SpecError(
                f"freeze: {', '.join(frozen)}: a module changes its buffers while it"
                " trains. Freeze all of its weights."
            )
        if frozen:
            eval_modules[parent] = module
        weights = chain(module.named_parameters(parent), module.named_buffers(parent))
        first, _ = next(weights, ("", None))
        if first and is_frozen(first) and all(is_frozen(name) for name, _ in weights):
            eval_modules |= dict(module.named_modules(prefix=parent))
    return eval_modules


def _outermost(names: Iterable[str]) -> list[str]:
    """Module names without those inside another named module."""
    modules = set(names)
    if "" in modules:
        return ["all of it"]
    return [
        name
        for name in sorted(modules)
        if not any(name[: dot.start()] in modules for dot in re.finditer(r"\.", name))
    ]


def require_common_weights(model: nn.Module) -> None:
    """Refuses layers that change weights in a forward pass by the samples that a replica has.

    Raises:
        SpecError: An embedding has a `max_norm`.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise SpecError(
                f"model: {name}: max_norm={module.max_norm:g} lets each forward pass shorten the rows that it"
                " reads, in place, so replicas with other samples would have other weights. Leave max_norm"
                " out and shorten the rows that were read, in the model's forward; or use one replica."
            )


def require_synchronized(model: nn.Module, device: torch.device) -> None:
    """Refuses layers of torch that would normalize over the samples of one replica instead of all.

    Raises:
        SpecError: A `SyncBatchNorm` is trained on a CPU, or without torch's process group.
    """
    if device.type != "cpu" and torch.distributed.is_initialized():
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training and is_local(module):
            raise SpecError(
                f"model: {name or 'it'!r} is a SyncBatchNorm, which torch synchronizes on GPUs alone, by a"
                " process group of its own. Set `batch_norm: global`, which normalizes over the samples of"
                " all replicas on every backend and device; or use one replica."
            )


def require_initialized(model: nn.Module) -> None:
    """Refuses uninitialized weights of lazy modules.

    Raises:
        SpecError: A lazy module was not called.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    if missing := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise SpecError(
            f"model: {', '.join(missing)}: belongs to a lazy module that was not called, so its shape is"
            " unknown. Call the model on a sample before you return it."
        )


def require_no_inference_tensors(model: nn.Module) -> None:
    """Refuses weights to train that were made under `torch.inference_mode`.

    Raises:
        SpecError: There are some.
    """
    weights = model.named_parameters()
    names = [name for name, weight in weights if weight.is_inference() and weight.requires_grad]
    if names:
        raise SpecError(
            f"model: {', '.join(names)}: made under torch.inference_mode(), so torch cannot train it. Build"
            " the model outside of it, or under torch.no_grad()."
        )


def require_separate_memory(model: nn.Module) -> None:
    """Refuses two parameters of a module, any shapes, that have elements of memory in common.

    Each would be updated by its own gradient alone where updates are sharded or computed by a server, and by
    both elsewhere; moved to another device, they are no longer tied.

    Raises:
        SpecError: There are two, of which one is trained.
    """
    by_storage: dict[Hashable, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or lacks_values(parameter):
            continue
        if type(parameter.data) is torch.Tensor and parameter.layout == torch.strided:
            storage = private_api.storage_of(parameter.data)
            by_storage.setdefault(storage, []).append((name, parameter))
    for group in by_storage.values():
        ends: list[tuple[int, str, nn.Parameter]] = []
        for name, parameter in sorted(group, key=lambda each: each[1].storage_offset()):
            start = parameter.storage_offset()
            ends = [each for each in ends if each[0] > start]
            for _, other, earlier in ends:
                is_trained = parameter.requires_grad or earlier.requires_grad
                if is_trained and share_elements(parameter, earlier):
                    first, second = sorted([other, name])
                    raise SpecError(
                        f"model: {first} and {second} are two parameters in the same memory. Use one"
                        f" parameter in both places (`a.weight = b.weight`), or give {second} memory of its"
                        " own: torch.nn.Parameter(x.clone())."
                    )
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in steps)
            ends.append((start + extent, name, parameter))


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of tensors that modules share, by their first name."""
    names: dict[int, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(others) for name, *others in names.values() if others}


def generators_of(model: nn.Module) -> dict[str, torch.Generator]:
    """Random generators in attributes of modules, by path."""
    return {
        f"{name}.{attribute}".removeprefix("."): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }


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
    if private_api.is_batch_norm(module) and is_local(module):
        is_synchronized = isinstance(module, nn.SyncBatchNorm)
        yield Trait.GLOBAL_STATISTICS if is_synchronized else Trait.LOCAL_STATISTICS
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
