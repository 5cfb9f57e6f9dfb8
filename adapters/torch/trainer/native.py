"""A native `torch.nn.Module` with a native torch optimizer."""

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
from isotrain.adapters.common.resolve import call_checked, resolve_for_framework
from isotrain.adapters.common.seeds import SEED_MASK, seed_offset
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
from isotrain.adapters.torch.trainer.state import State, in_place
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
"""Of a GradScaler's state."""
_NAMED = 5
"""Buffers in a note, at most."""
_MIXED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class NativeTrainer(ReplicaTrainer):
    """Drives a torch module as a hand-written script would."""

    _has_updated = False
    """Whether `apply` was called."""

    def __init__(self, spec: TrainingSpec, model: nn.Module, device: torch.device) -> None:
        _require_initialised(model)
        self.model = model.to(device)
        if spec.precision == "float64":
            self.model = model.double()
        self._spec = spec
        self._device = device
        self._mixed = _MIXED.get(spec.precision)
        self._clip = spec.clip
        self._left, self._woken = left_in_evaluation(model)
        self._still = [*(self._left | freeze(model, spec.is_frozen)).values()]
        recompute(model, spec)
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self.frozen = frozen | dict(model.named_buffers())
        self.aliases = _aliases(model)
        resting = {id(b) for m in self._left.values() for b in m.buffers(recurse=False)}
        moved = {
            name: buffer
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and not spec.is_frozen(name) and id(buffer) not in resting
        }
        self.statistics = [buffer for name, buffer in moved.items() if _is_statistic(name)]
        self._own = {name: buffer for name, buffer in moved.items() if not _is_statistic(name)}
        self._versions: dict[str, int] = {}
        self.self_updating = list(model.buffers())
        self._fixed = list(frozen.values())
        self._update_only(self.trainable)
        self._scales = spec.loss_scaling is not None
        scaling = spec.loss_scaling or LossScale()
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=scaling.initial,
            growth_interval=scaling.growth_steps,
            enabled=self._scales,
        )
        self._loss = None if spec.loss is None else TotalLoss(spec)
        called = _called(model, spec)
        self._forward = self.with_autocast(called)
        self._compute = self.with_autocast(loss_computer(spec, called, self._loss))
        self.loss_module = LossModule(model, self._compute)
        self._without_gradients = WithoutGradients()
        self._held = _generators_of(self.model)
        self._first_seeds = [generator.initial_seed() for generator in self._held.values()]
        self._train()
        self.carry = Carry(dict(model.named_modules()), {}, device)

    def _update_only(self, weights: dict[str, torch.Tensor]) -> None:
        """Makes an optimizer of some weights, or of their parts."""
        self.updated = list(weights.values())
        self.optimizer = build_optimizer(self._spec, self.updated)
        self._update = native_update(self._spec, self.optimizer, self.updated)
        is_own = isinstance(self._spec.optimizer, CustomOptimizer)
        named = self.trainable | weights
        self._optimizer_state = NativeOptimizerState(self.optimizer, named, weights.keys(), is_own)
        self._rates = ParamGroupRates(self.optimizer, self._spec.optimizer.lr, watched=is_own)

    def rebind_parameters(self) -> None:
        """Trains the parameters that the model has now, under the same names."""
        named = dict(self.model.named_parameters())
        self.trainable = {name: named[name] for name in self.trainable}
        self._update_only(self.trainable)

    def shard_optimizer(self, places: Sequence[int]) -> None:
        weights = list(self.trainable.items())
        self._update_only(dict(weights[place] for place in places))

    def is_local_slot(self, slot: str) -> bool:
        return self._optimizer_state.is_partial and slot.rpartition("/")[0] in self.trainable

    def is_remote_slot(self, slot: str) -> bool:
        return self._optimizer_state.is_remote_slot(slot)

    def with_autocast(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A function that computes in the precision of the spec."""
        if self._mixed is None:
            return compute

        def mixed(*given: Any) -> Any:
            with torch.autocast(self._device.type, dtype=self._mixed):
                return compute(*given)

        return mixed

    def zero_gradients(self) -> None:
        super().zero_gradients()
        if self._fixed:
            self._require_fixed()

    def _require_fixed(self) -> None:
        """Refuses that somebody trains what was frozen when the run began: no optimizer has it.

        Raises:
            SpecError: A weight is to be trained now.
        """
        for parameter in self._fixed:
            if parameter.requires_grad:
                name = next(n for n, p in self.frozen.items() if p is parameter)
                raise SpecError(
                    f"requires_grad: expected that {name!r}, which was frozen when the run began, stays so,"
                    " received True: its optimizer does not have it. Let it be trained at the start and"
                    " freeze it there with requires_grad_(False) in the loop, or end the run with a"
                    " checkpoint, and go on with another `initial_weights.freeze`."
                )

    def build_metrics(self, phase: Phase) -> list[Metric]:
        return build_metrics(self._spec, self._device, self._loss)

    def traits(self) -> list[LayerTrait]:
        return model_traits(self.model)

    def refuses(self, inputs: Any, targets: Any) -> str | None:
        reached: list[str] = []
        handles = [
            module.register_forward_pre_hook(
                lambda module, given, name=name: reached.append(f"{name} ({type(module).__name__})")
            )
            for name, module in self.model.named_modules()
        ]
        try:
            self._without_gradients(self._compute, inputs, targets)
        except Exception as error:  # a person's functions raise anything, which a step tells of
            return reached[-1] if private_api.TOO_FEW_VALUES_ERROR in str(error) else None
        finally:
            for handle in handles:
                handle.remove()
        return None

    def evaluate(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        with contextlib.nullcontext() if self._loss is None else self._loss.as_partial_mean():
            found: tuple[torch.Tensor, Any] = self.evaluated(self._compute, inputs, targets)
        return found

    def predict(self, inputs: Any) -> Any:
        return as_plain_tree(self.evaluated(self._forward, inputs))

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        self.evaluated(export.write, self.model, form, target, inputs)

    def evaluated(self, compute: Callable[..., Any], *given: Any) -> Any:
        """What a function gives with the model in evaluation mode, without gradients of it."""
        self.model.eval()
        try:
            return self._without_gradients(compute, *given)
        finally:
            self._train()

    def _train(self) -> None:
        """Has the model in training mode, but for what is frozen or was left in evaluation mode."""
        self.model.train()
        for module in self._still:
            module.training = False  # not its children, which `eval` would mean too

    def model_notes(self) -> list[str]:
        notes = _of_own(list(self._own))
        if self._woken:
            notes.append(
                f"model: {', '.join(_outermost(self._woken))}: in evaluation mode, and trained in training"
                " mode, since its weights are trained; a part whose weights do not require gradients stays in"
                " evaluation mode"
            )
        if self._left:
            notes.append(
                f"model: {', '.join(_outermost(self._left))}: left in evaluation mode by the model function,"
                " and so in training too (no dropout, no batch statistics); call `train` there to have it"
                " otherwise"
            )
        return notes

    def loss_of(self, targets: Any, predictions: Any) -> torch.Tensor:
        """The loss of a slice, as the objective gives it, where the spec names one."""
        assert self._loss is not None
        found: torch.Tensor = self.with_autocast(self._loss)(targets, predictions)
        return found

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
        (self._scaler.scale(loss) if self._scales else loss).backward()

    def loss_scale(self) -> float:
        return self._scaler.get_scale()

    def loss_scale_state(self) -> dict[str, torch.Tensor]:
        own = self._scaler.state_dict()
        return {name: torch.tensor(own[key]) for name, key in _SCALE_KEYS.items() if key in own}

    def write_loss_scale(self, name: str, value: torch.Tensor) -> None:
        own = self._scaler.state_dict()
        known = self.loss_scale_state()
        if name not in known:
            raise IsotrainError(unknown_name("state", f"loss-scale/{name}", known))
        self._scaler.load_state_dict(own | {_SCALE_KEYS[name]: value.item()})

    def set_learning_rate(self, rate: float) -> None:
        self._rates.set(rate)

    def optimizer_rates(self) -> tuple[float, float] | None:
        return self._rates.by_optimizer()

    def apply(self, norm: torch.Tensor | None = None) -> None:
        if not self._has_updated:
            self._has_updated = True
            self._require_no_late_weights()
        if norm is not None:
            assert self._clip is not None, "a norm is of gradients that the spec clips by it"
            nn.utils.clip_grads_with_norm_(self.updated, self._clip.global_norm, norm)
        elif self._clip is not None:
            self._scaler.unscale_(self.optimizer)
            clip_gradients(self.updated, self._clip)
        if self._scales:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self._update()

    def _require_no_late_weights(self) -> None:
        """Refuses weights that nobody updates or exchanges.

        Raises:
            SpecError: A forward pass has made parameters.
        """
        known = self.trainable | self.frozen
        if late := [name for name, _ in self.model.named_parameters() if name not in known]:
            raise SpecError(
                f"model: {', '.join(late)}: made in a forward pass. The optimizer does not have them, and"
                " each replica has its own. Make all parameters in the model function, or call the model on"
                " a sample before you return it."
            )

    def seed_replica(self, replica: int) -> None:
        torch.manual_seed(torch.initial_seed() + replica)
        self._versions = {name: private_api.version_of(each) for name, each in self._own.items()}

    def reseed(self, replica: int, step: int) -> None:
        shift = seed_offset(replica, step)
        torch.manual_seed((self._spec.seed + shift) & SEED_MASK)
        for generator, first in zip(self._held.values(), self._first_seeds, strict=True):
            generator.manual_seed((first + shift) & SEED_MASK)

    def generators(self) -> dict[str, State]:
        return {name: (held.get_state, held.set_state) for name, held in self._held.items()}

    def local_buffers(self) -> dict[str, torch.Tensor]:
        return self._own

    def execution_state(self) -> dict[str, torch.Tensor]:
        """The buffers of its own that were written since the start."""
        return {
            LOCAL_BUFFERS + name: buffer
            for name, buffer in self._own.items()
            if private_api.version_of(buffer) != self._versions.get(name)
        }

    def write_execution_state(self, name: str, value: torch.Tensor) -> None:
        in_place({LOCAL_BUFFERS + own: buffer for own, buffer in self._own.items()}).write(
            name, value
        )

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
    """Those that modules hold, by their names."""
    return {
        f"{name}.{attribute}".removeprefix("."): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }


def _of_own(buffers: Sequence[str]) -> list[str]:
    """Says of buffers that they are each replica's own."""
    if not buffers:
        return []
    names = ", ".join(buffers[:_NAMED]) + ", ..." * (len(buffers) > _NAMED)
    return [
        f"model: {names}: each replica keeps such buffers as its own forward passes leave them; averaged in"
        " every step are moving statistics, which are those named running_*"
    ]


def _is_statistic(name: str) -> bool:
    """Whether a buffer is a moving statistic, which are named as those of torch's own modules."""
    return name.rpartition(".")[2].startswith("running_")


def _require_initialised(model: nn.Module) -> None:
    """Refuses weights that do not exist yet.

    Raises:
        SpecError: A lazy module was not called.
    """
    held = (*model.named_parameters(), *model.named_buffers())
    if missing := [name for name, tensor in held if is_lazy(tensor)]:
        raise SpecError(
            f"model: {', '.join(missing)}: of a lazy module that was not called, so that its shape is not"
            " known. Call the model on a sample before you return it."
        )


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of tensors that modules share, by their first names: all others."""
    names: dict[int, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def left_in_evaluation(
    model: nn.Module,
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Finds the modules that a model function has left in evaluation mode.

    Returns:
        Those that stay in it, by name: none of their parameters requires gradients. And those that are
        trained in training mode: they have weights to train, as a model of `from_pretrained` has; layers
        without weights, such as dropout, follow the module that they are in.
    """
    left: dict[str, nn.Module] = {}
    woken: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module, is_in_woken: bool) -> None:
        parameters = list(module.parameters())
        if module.training:
            is_in_woken = False
        elif any(parameter.requires_grad for parameter in parameters):
            woken[name], is_in_woken = module, True
        elif parameters or not is_in_woken:
            left[name], is_in_woken = module, False
        for child, inner in module.named_children():
            look(f"{name}.{child}" if name else child, inner, is_in_woken)

    look("", model, False)
    return left, woken


def freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> dict[str, nn.Module]:
    """Freezes parameters by name.

    Returns:
        The modules that stay in evaluation mode, by name: those with frozen buffers, which training must not
        move; and those all of whose weights are frozen, with all that is inside of them.

    Raises:
        SpecError: A buffer is to be frozen, and a parameter beside it is not.
    """
    still = {}
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
                f"initial_weights.freeze: {', '.join(frozen)}: a module moves its buffers as long as it"
                " trains. Name all of its weights."
            )
        if frozen:
            still[parent] = module
        weights = chain(module.named_parameters(parent), module.named_buffers(parent))
        first, _ = next(weights, ("", None))
        if first and is_frozen(first) and all(is_frozen(name) for name, _ in weights):
            still |= dict(module.named_modules(prefix=parent))
    return still


def _outermost(names: Iterable[str]) -> list[str]:
    """The names of modules, without those that are inside of others of them."""
    known = set(names)
    if "" in known:
        return ["all of it"]
    return [
        name
        for name in sorted(known)
        if not any(name[: end.start()] in known for end in re.finditer(r"\.", name))
    ]


def _called(model: nn.Module, spec: TrainingSpec) -> Any:
    """What to call for the model: itself, or its compiled form; torch's compiler takes long to import."""
    if not spec.compile:
        return model
    from isotrain.adapters.torch.base.compile import compiled

    return compiled(model)


def loss_computer(
    spec: TrainingSpec, model: nn.Module, loss: TotalLoss | None
) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
    """Makes the function from (inputs, targets) to mean loss and predictions."""
    if spec.objective is not None:
        objective = resolve_for_framework(spec.objective, "torch", "objective")

        def compute_objective(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
            given = objective(model, objective_batch(inputs, targets))
            losses, predictions = given if isinstance(given, tuple) else (given, None)
            return mean_over_samples(losses), predictions

        return compute_objective
    assert loss is not None

    def compute(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        predictions = model(inputs)
        return loss(targets, predictions), predictions

    return compute


def build_optimizer(spec: TrainingSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the torch optimizer that the spec names, or the person's own."""
    settings = spec.optimizer
    if isinstance(settings, CustomOptimizer):
        factory = resolve_for_framework(settings.custom, "torch", "optimizer.custom")
        form, given = "(parameters, learning_rate, **args)", (parameters, settings.lr)
        optimizer = call_checked(form, factory, "optimizer.custom", *given, **settings.args)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"optimizer.custom: it returned {type(optimizer).__name__!r}; for a torch module it"
                f" must return a torch.optim.Optimizer, from {form}."
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise SpecError(
                f"optimizer.custom: the step of {type(optimizer).__name__} computes the loss several times,"
                " by a closure, and a step of a run computes it once. Return an optimizer that needs none."
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
