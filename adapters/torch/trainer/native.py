"""Trainer of a native `torch.nn.Module` with a native torch optimizer."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from isotrain.adapters.common.outputs import as_plain_tree, objective_batch
from isotrain.adapters.common.seeds import SEED_MASK, seed_offset
from isotrain.adapters.common.spec_components import call_checked, resolve_for_framework
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.layer_traits import model_traits
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.base.recompute import recompute
from isotrain.adapters.torch.loss.loss import TotalLoss, mean_over_samples
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.adapters.torch.metrics.registry import build_metrics
from isotrain.adapters.torch.optim.fused_sgd import native_update
from isotrain.adapters.torch.optim.group_rates import ParamGroupRates
from isotrain.adapters.torch.optim.lamb import Lamb
from isotrain.adapters.torch.optim.state import NativeOptimizerState
from isotrain.adapters.torch.trainer import export
from isotrain.adapters.torch.trainer.base import LOCAL_BUFFERS, LossModule, ReplicaTrainer
from isotrain.adapters.torch.trainer.carried_state import Carry
from isotrain.adapters.torch.trainer.state import StateAccess, in_place
from isotrain.plugin import (
    CustomOptimizer,
    ExportForm,
    IsotrainError,
    LayerTrait,
    LossScale,
    Phase,
    SpecError,
    StatePart,
    TrainingSpec,
    unknown_name,
)

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lamb": Lamb,
}
_TORCH_NAMES = {"epsilon": "eps", "rho": "alpha"}
_SCALE_KEYS = {"scale": "scale", "steps": "_growth_tracker"}
"""Keys of a GradScaler's state."""
_MAX_NAMED = 5
"""Maximum number of buffers that a note names."""
_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class NativeTrainer(ReplicaTrainer):
    """Trains a torch module as a hand-written script would."""

    _has_updated = False
    """Whether `apply` was called."""

    def __init__(self, spec: TrainingSpec, model: nn.Module, device: torch.device) -> None:
        _require_initialized(model)
        self.model = model.to(device)
        if spec.precision == "float64":
            self.model = model.double()
        self._spec = spec
        self._device = device
        self._autocast_dtype = _AUTOCAST_DTYPES.get(spec.precision)
        self._clip = spec.clip
        self._left_in_eval, self._switched_to_train = left_in_evaluation(model)
        self._eval_modules = [*(self._left_in_eval | freeze(model, spec.is_frozen)).values()]
        recompute(model, spec)
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self.frozen = frozen | dict(model.named_buffers())
        self.aliases = _aliases(model)
        eval_mode_buffers = {
            id(b) for m in self._left_in_eval.values() for b in m.buffers(recurse=False)
        }
        floating = {
            name: buffer
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point()
            and not spec.is_frozen(name)
            and id(buffer) not in eval_mode_buffers
        }
        self.statistics = [buffer for name, buffer in floating.items() if _is_statistic(name)]
        self._local_buffers = {
            name: buffer for name, buffer in floating.items() if not _is_statistic(name)
        }
        self._buffer_versions: dict[str, int] = {}
        self.self_updating = list(model.buffers())
        self._initially_frozen = list(frozen.values())
        self._build_optimizer(self.trainable)
        self._scales_loss = spec.loss_scaling is not None
        scaling = spec.loss_scaling or LossScale()
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=scaling.initial,
            growth_interval=scaling.growth_steps,
            enabled=self._scales_loss,
        )
        self._loss = None if spec.loss is None else TotalLoss(spec)
        callable_model = _maybe_compiled(model, spec)
        self._forward = self.with_autocast(callable_model)
        self._compute = self.with_autocast(loss_computer(spec, callable_model, self._loss))
        self.loss_module = LossModule(model, self._compute)
        self._without_gradients = WithoutGradients()
        self._generators = _generators_of(self.model)
        self._initial_seeds = [generator.initial_seed() for generator in self._generators.values()]
        self._set_train_mode()
        self.carry = Carry(dict(model.named_modules()), {}, device)

    def _build_optimizer(self, weights: dict[str, torch.Tensor]) -> None:
        """Builds the optimizer of some weights, or of their shards, by name."""
        self.updated = list(weights.values())
        self.optimizer = build_optimizer(self._spec, self.updated)
        self._update = native_update(self._spec, self.optimizer, self.updated)
        is_custom = isinstance(self._spec.optimizer, CustomOptimizer)
        named = self.trainable | weights
        self._optimizer_state = NativeOptimizerState(
            self.optimizer, named, weights.keys(), is_custom
        )
        self._rates = ParamGroupRates(self.optimizer, self._spec.optimizer.lr, watched=is_custom)

    def rebind_parameters(self) -> None:
        """Trains the model's present parameters of the same names (after `fully_shard` replaced them)."""
        named = dict(self.model.named_parameters())
        self.trainable = {name: named[name] for name in self.trainable}
        self._build_optimizer(self.trainable)

    def shard_optimizer(self, indices: Sequence[int]) -> None:
        weights = list(self.trainable.items())
        self._build_optimizer(dict(weights[index] for index in indices))

    def is_local_slot(self, slot: str) -> bool:
        return self._optimizer_state.is_partial and slot.rpartition("/")[0] in self.trainable

    def is_remote_slot(self, slot: str) -> bool:
        return self._optimizer_state.is_remote_slot(slot)

    def with_autocast(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function in the autocast of the spec's precision."""
        if self._autocast_dtype is None:
            return compute

        def mixed(*args: Any) -> Any:
            with torch.autocast(self._device.type, dtype=self._autocast_dtype):
                return compute(*args)

        return mixed

    def zero_gradients(self) -> None:
        super().zero_gradients()
        if self._initially_frozen:
            self._require_still_frozen()

    def _require_still_frozen(self) -> None:
        """Refuses gradients for weights that were frozen when the run began: the optimizer lacks them.

        Raises:
            SpecError: Such a weight requires gradients now.
        """
        for parameter in self._initially_frozen:
            if parameter.requires_grad:
                name = next(n for n, p in self.frozen.items() if p is parameter)
                raise SpecError(
                    f"requires_grad: expected False for {name!r}, which was frozen when the run began,"
                    " received True: the optimizer does not have it. Let it be trainable at the start and"
                    " freeze it with requires_grad_(False) in the loop, or end the run with a checkpoint and"
                    " resume it with another `initial_weights.freeze`."
                )

    def build_metrics(self, phase: Phase) -> list[Metric]:
        return build_metrics(self._spec, self._device, self._loss)

    def traits(self) -> list[LayerTrait]:
        return model_traits(self.model)

    def untrainable_layer(self, inputs: Any, targets: Any) -> str | None:
        reached: list[str] = []
        handles = [
            module.register_forward_pre_hook(
                lambda module, args, name=name: reached.append(f"{name} ({type(module).__name__})")
            )
            for name, module in self.model.named_modules()
        ]
        try:
            self._without_gradients(self._compute, inputs, targets)
        except Exception as error:  # user functions raise anything; the step will report it
            return reached[-1] if private_api.TOO_FEW_VALUES_ERROR in str(error) else None
        finally:
            for handle in handles:
                handle.remove()
        return None

    def evaluate(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        with contextlib.nullcontext() if self._loss is None else self._loss.as_partial_mean():
            result: tuple[torch.Tensor, Any] = self.call_in_eval_mode(
                self._compute, inputs, targets
            )
        return result

    def predict(self, inputs: Any) -> Any:
        return as_plain_tree(self.call_in_eval_mode(self._forward, inputs))

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        self.call_in_eval_mode(export.write, self.model, form, target, inputs)

    def call_in_eval_mode(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Calls a function with the model in evaluation mode and without gradients."""
        self.model.eval()
        try:
            return self._without_gradients(compute, *args)
        finally:
            self._set_train_mode()

    def _set_train_mode(self) -> None:
        """Sets training mode, except for modules that are frozen or were left in evaluation mode."""
        self.model.train()
        for module in self._eval_modules:
            module.training = False  # not its children, which `eval` would mean too

    def model_notes(self) -> list[str]:
        notes = _local_buffer_notes(list(self._local_buffers))
        if self._switched_to_train:
            notes.append(
                f"model: {', '.join(_outermost(self._switched_to_train))}: built in evaluation mode, but"
                " trained in training mode, since its weights are trained; a part whose weights do not"
                " require gradients stays in evaluation mode"
            )
        if self._left_in_eval:
            notes.append(
                f"model: {', '.join(_outermost(self._left_in_eval))}: left in evaluation mode by the model"
                " function, and so in training too (no dropout, no batch statistics); call `train` there to"
                " change that"
            )
        return notes

    def loss_of(self, targets: Any, predictions: Any) -> torch.Tensor:
        """Loss of a slice (shapes: see `LossModule`), for a spec that names a loss."""
        assert self._loss is not None
        loss: torch.Tensor = self.with_autocast(self._loss)(targets, predictions)
        return loss

    def has_own_denominator(self, inputs: Any, targets: Any) -> bool:
        if self._loss is None:
            return False
        return not self._loss.counts_samples_equally or (
            self._loss.may_ignore_padding and bool(self._loss.padding_fraction(targets))
        )

    @property
    def may_ignore_padding(self) -> bool:
        return self._loss is not None and self._loss.may_ignore_padding and self._loss.is_split

    def padding_fraction(self, targets: Any) -> torch.Tensor:
        assert self._loss is not None
        return self._loss.padding_fraction(targets)

    def set_split(self, is_split: bool) -> None:
        if self._loss is not None:
            self._loss.is_split = is_split

    def loss_denominators(self, inputs: Any, targets: Any) -> torch.Tensor:
        assert self._loss is not None
        return self._loss.loss_denominators(targets)

    def backward(self, loss: torch.Tensor) -> None:
        (self._scaler.scale(loss) if self._scales_loss else loss).backward()

    def loss_scale(self) -> float:
        return self._scaler.get_scale()

    def loss_scale_state(self) -> dict[str, torch.Tensor]:
        state = self._scaler.state_dict()
        return {name: torch.tensor(state[key]) for name, key in _SCALE_KEYS.items() if key in state}

    def write_loss_scale(self, name: str, value: torch.Tensor) -> None:
        scaler_state = self._scaler.state_dict()
        state = self.loss_scale_state()
        if name not in state:
            raise IsotrainError(unknown_name("state", f"loss-scale/{name}", state))
        self._scaler.load_state_dict(scaler_state | {_SCALE_KEYS[name]: value.item()})

    def set_learning_rate(self, rate: float) -> None:
        self._rates.set(rate)

    def optimizer_rates(self) -> tuple[float, float] | None:
        return self._rates.by_optimizer()

    def apply(self, norm: torch.Tensor | None = None) -> None:
        if not self._has_updated:
            self._has_updated = True
            self._require_no_new_weights()
        if norm is not None:
            assert self._clip is not None, (
                "a norm is given only where the spec clips by global norm"
            )
            nn.utils.clip_grads_with_norm_(self.updated, self._clip.global_norm, norm)
        elif self._clip is not None:
            self._scaler.unscale_(self.optimizer)
            clip_gradients(self.updated, self._clip)
        if self._scales_loss:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self._update()

    def _require_no_new_weights(self) -> None:
        """Refuses weights that are neither updated nor synchronised.

        Raises:
            SpecError: A forward pass has created parameters.
        """
        weights = self.trainable | self.frozen
        if new := [name for name, _ in self.model.named_parameters() if name not in weights]:
            raise SpecError(
                f"model: {', '.join(new)}: created in a forward pass. The optimizer does not have them, and"
                " each replica has its own. Create all parameters in the model function, or call the model"
                " on a sample before you return it."
            )

    def seed_replica(self, replica: int) -> None:
        torch.manual_seed(torch.initial_seed() + replica)
        self._buffer_versions = {
            name: private_api.version_of(each) for name, each in self._local_buffers.items()
        }

    def reseed(self, replica: int, step: int) -> None:
        shift = seed_offset(replica, step)
        torch.manual_seed((self._spec.seed + shift) & SEED_MASK)
        for generator, initial in zip(self._generators.values(), self._initial_seeds, strict=True):
            generator.manual_seed((initial + shift) & SEED_MASK)

    def generators(self) -> dict[str, StateAccess]:
        return {name: (each.get_state, each.set_state) for name, each in self._generators.items()}

    def local_buffers(self) -> dict[str, torch.Tensor]:
        return self._local_buffers

    def execution_state(self) -> dict[str, torch.Tensor]:
        """Local buffers that were written since the start."""
        return {
            LOCAL_BUFFERS + name: buffer
            for name, buffer in self._local_buffers.items()
            if private_api.version_of(buffer) != self._buffer_versions.get(name)
        }

    def write_execution_state(self, name: str, value: torch.Tensor) -> None:
        buffers = {LOCAL_BUFFERS + name: buffer for name, buffer in self._local_buffers.items()}
        in_place(buffers).write(name, value)

    def part(self, name: StatePart) -> list[torch.Tensor]:
        if name == "momenta":
            self._optimizer_state.make()
        return super().part(name)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return self._optimizer_state.read()

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        self._optimizer_state.write(name, value)

    def not_checkpointed(self) -> list[str]:
        scheduler = ["the learning-rate scheduler inside of the optimizer"]
        return [
            *(scheduler if self._rates.are_scheduled else []),
            *(
                f"the optimizer's {slot!r}, which is neither a tensor nor a number"
                for slot in self._optimizer_state.not_checkpointed()
            ),
        ]


def _generators_of(model: nn.Module) -> dict[str, torch.Generator]:
    """Random generators in attributes of modules, by path."""
    return {
        f"{name}.{attribute}".removeprefix("."): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }


def _local_buffer_notes(buffers: Sequence[str]) -> list[str]:
    """Notes that buffers are not synchronised between replicas."""
    if not buffers:
        return []
    names = ", ".join(buffers[:_MAX_NAMED]) + ", ..." * (len(buffers) > _MAX_NAMED)
    return [
        f"model: {names}: each replica keeps its own value of these buffers; only moving statistics, the"
        " buffers named running_*, are averaged in every step"
    ]


def _is_statistic(name: str) -> bool:
    """Whether a buffer is a moving statistic, by torch's naming convention `running_*`."""
    return name.rpartition(".")[2].startswith("running_")


def _require_initialized(model: nn.Module) -> None:
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


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of tensors that modules share, by their first name."""
    names: dict[int, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(others) for name, *others in names.values() if others}


def left_in_evaluation(
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


def freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> dict[str, nn.Module]:
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
                f"initial_weights.freeze: {', '.join(frozen)}: a module changes its buffers while it"
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


def _maybe_compiled(model: nn.Module, spec: TrainingSpec) -> Any:
    """The model, or its `torch.compile`d form; the compiler is imported late because it takes long."""
    if not spec.compile:
        return model
    from isotrain.adapters.torch.base.compile import compiled

    return compiled(model)


def loss_computer(
    spec: TrainingSpec, model: nn.Module, loss: TotalLoss | None
) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
    """Makes the function from inputs and targets to loss (shapes: see `LossModule`) and predictions."""
    if spec.objective is not None:
        objective = resolve_for_framework(spec.objective, "torch", "objective")

        def compute_objective(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
            result = objective(model, objective_batch(inputs, targets))
            losses, predictions = result if isinstance(result, tuple) else (result, None)
            return mean_over_samples(losses), predictions

        return compute_objective
    assert loss is not None

    def compute(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        predictions = model(inputs)
        return loss(targets, predictions), predictions

    return compute


def build_optimizer(spec: TrainingSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Builds the torch optimizer that the spec names, or the user's custom one."""
    settings = spec.optimizer
    if isinstance(settings, CustomOptimizer):
        factory = resolve_for_framework(settings.custom, "torch", "optimizer.custom")
        form, args = "(parameters, learning_rate, **args)", (parameters, settings.lr)
        optimizer = call_checked(form, factory, "optimizer.custom", *args, **settings.args)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"optimizer.custom: it returned {type(optimizer).__name__!r}; for a torch module it"
                f" must return a torch.optim.Optimizer, from {form}."
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise SpecError(
                f"optimizer.custom: {type(optimizer).__name__}.step needs a closure, to compute the loss"
                " several times, and a training step computes it once. Return an optimizer that needs no"
                " closure."
            )
        return optimizer
    options = dict(settings)
    del options["name"]
    if "beta_1" in options:
        options["betas"] = (options.pop("beta_1"), options.pop("beta_2"))
    renamed = {_TORCH_NAMES.get(name, name): value for name, value in options.items()}
    return _OPTIMIZERS[settings.name](parameters, **renamed)


def clip_gradients(parameters: Iterable[nn.Parameter], clip: Any) -> None:
    """Clips gradients in place: by value, each by its norm, or all by their global norm."""
    parameters = list(parameters)
    if clip.value is not None:
        nn.utils.clip_grad_value_(parameters, clip.value)
    elif clip.global_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip.global_norm)
    else:
        for parameter in parameters:
            nn.utils.clip_grad_norm_(parameter, clip.norm)
