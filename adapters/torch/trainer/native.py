"""Trainer of a native `torch.nn.Module` with a native torch optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn

from isotrain.adapters.common.model_call import model_call
from isotrain.adapters.common.objective import Objective
from isotrain.adapters.common.outputs import as_plain_tree
from isotrain.adapters.common.seeds import SEED_MASK, seed_offset
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.batch_norm import normalize_ghost_batches, normalize_globally
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.base.random_layers import draw_by_sample
from isotrain.adapters.torch.base.recompute import recompute
from isotrain.adapters.torch.base.tensors import make_contiguous, separate_gradients
from isotrain.adapters.torch.loss.objective import objective_computer
from isotrain.adapters.torch.loss.total import TotalLoss
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.adapters.torch.metrics.named_losses import NamedLosses
from isotrain.adapters.torch.metrics.registry import build_metrics
from isotrain.adapters.torch.optim.fused_sgd import native_update
from isotrain.adapters.torch.optim.group_rates import ParamGroupRates, momentum_setter
from isotrain.adapters.torch.optim.native import build_optimizer, clip_gradients, needs_closure
from isotrain.adapters.torch.optim.state import NativeOptimizerState
from isotrain.adapters.torch.optimizer_state_names import slot_names
from isotrain.adapters.torch.trainer import export
from isotrain.adapters.torch.trainer.base import LossModule, ReplicaTrainer
from isotrain.adapters.torch.trainer.carried_state import Carry
from isotrain.adapters.torch.trainer.local_buffers import LocalBuffers, is_statistic
from isotrain.adapters.torch.trainer.modules import (
    EvaluationModules,
    generators_of,
    model_traits,
    require_initialized,
    require_no_inference_tensors,
    tied_names,
)
from isotrain.adapters.torch.trainer.state import StateAccess
from isotrain.adapters.torch.trainer.step_context import TorchStepContext
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
    UnsupportedError,
    unknown_name,
    weight_groups,
)

_SCALE_KEYS = {"scale": "scale", "steps": "_growth_tracker"}
"""Keys of a GradScaler's state."""
_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class NativeTrainer(ReplicaTrainer):
    """Trains a torch module as a hand-written script would."""

    _has_updated = False
    """Whether weights were updated."""

    def __init__(
        self,
        spec: TrainingSpec,
        model: nn.Module,
        device: torch.device,
        frozen: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self.frozen_models = frozen
        self._take_model(spec, model, device)
        self.trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if spec.reproducible:
            make_contiguous(self.trainable, [*model.parameters(), *model.buffers()])
        if not spec.updates:
            self._take_update(spec, self.trainable)

    def _take_model(self, spec: TrainingSpec, model: nn.Module, device: torch.device) -> None:
        """Prepares the model for training."""
        require_initialized(model)
        require_no_inference_tensors(model)
        self.model = model.to(device)
        if spec.precision == "float64":
            self.model = model.double()
        self._spec = spec
        self._device = device
        self._autocast_dtype = _AUTOCAST_DTYPES.get(spec.precision)
        self._evaluation_modules = EvaluationModules(model, spec.is_frozen)
        recompute(model, spec)
        self.aliases = tied_names(model)
        parameters = dict(model.named_parameters())
        trainable = {name for name, each in parameters.items() if each.requires_grad}
        others = {n: each for n, each in parameters.items() if n not in trainable}
        others |= dict(model.named_buffers())
        per_replica = {name: others[name] for name in spec.per_replica_names(trainable, others)}
        constant_buffers = set(map(id, self._evaluation_modules.buffers))
        updated_buffers = {
            name: buffer
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point()
            and not spec.is_frozen(name)
            and id(buffer) not in constant_buffers
            and name not in per_replica
        }
        self.statistics = [each for name, each in updated_buffers.items() if is_statistic(name)]
        self._local_buffers = LocalBuffers(
            {name: each for name, each in updated_buffers.items() if not is_statistic(name)}
        )
        self.self_updating = list(model.buffers())
        self._callable_model = _maybe_compiled(model, spec)
        self._call = model_call(spec, "torch", self._callable_model)
        self._forward = self.with_autocast(self._call)
        self._without_gradients = WithoutGradients()
        self._generators = generators_of(self.model)
        self._initial_seeds = [generator.initial_seed() for generator in self._generators.values()]
        self._evaluation_modules.set_train_mode()
        self.carry = Carry(dict(model.named_modules()), per_replica, device)

    def _take_update(self, spec: TrainingSpec, trainable: dict[str, torch.Tensor]) -> None:
        """Builds what the weights to train, tensors by name, any shapes, are trained by."""
        self._spec = spec
        self.step = TorchStepContext(spec, self.frozen_models)
        self.objective = Objective.of(spec, "torch", self.step)
        if spec.batch_norm == "global":
            normalize_globally(self.model, self.step)
        if self.step.has_ghost_batches:
            normalize_ghost_batches(self.model, self.step)
        if spec.random_layers == "per-sample":
            draw_by_sample(self.model)
        self._clip = spec.clip
        self.trainable = trainable
        parameters = self.model.named_parameters()
        frozen = {name: each for name, each in parameters if name not in trainable}
        self.frozen = frozen | dict(self.model.named_buffers())
        self._initially_frozen = list(frozen.values())
        self._build_optimizer(self.trainable)
        self._scales_loss = spec.loss_scaling is not None
        scaling = spec.loss_scaling or LossScale()
        self._scaler = torch.amp.GradScaler(
            self._device.type,
            init_scale=scaling.initial,
            growth_interval=scaling.growth_steps,
            enabled=self._scales_loss,
        )
        self._loss = None if spec.loss is None else TotalLoss(spec)
        self._compute = self.with_autocast(
            self.step.drawing(
                self._loss_computer()
                if self.objective is None
                else objective_computer(self.objective, self.model, self._callable_model)
            )
        )
        self.loss_module = LossModule(self.model, self._compute)

    def _loss_computer(self) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
        """Makes the function from inputs and targets to loss (shapes: see `LossModule`) and predictions."""
        return loss_computer(self._call, self._loss)

    def for_update(self, spec: TrainingSpec, names: Collection[str]) -> Self:
        trainer = copy.copy(self)
        trainer._take_update(spec, {n: p for n, p in self.trainable.items() if n in names})
        return trainer

    def _build_optimizer(self, weights: dict[str, torch.Tensor]) -> None:
        """Builds the optimizer of some weights, or of their shards, by name; any shapes."""
        self.updated = list(weights.values())
        groups = weight_groups(self._spec.optimizer, list(self.trainable), list(weights))
        self.optimizer = build_optimizer(self._spec, self.updated, groups, list(weights))
        self.needs_closure = needs_closure(self.optimizer)
        self._update = native_update(self._spec, self.optimizer)
        is_custom = isinstance(self._spec.optimizer, CustomOptimizer)
        named = self.trainable | weights
        self._optimizer_state = NativeOptimizerState(
            self.optimizer,
            named,
            weights.keys(),
            is_custom,
            slot_names(self._spec.optimizer.name, self._spec.optimizer.slots),
        )
        factors = None if is_custom else [group.lr_factor for group in groups]
        schedules = [group.schedule for group in groups]
        self._rates = ParamGroupRates(
            self.optimizer, self._spec.optimizer.lr, factors, [] if is_custom else schedules
        )

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

    def set_frozen(self, names: Collection[str]) -> None:
        if self.needs_closure:
            raise UnsupportedError(
                f"session.freeze: {type(self.optimizer).__name__} moves all weights along directions of"
                " earlier steps. Use an optimizer that needs no closure."
            )
        super().set_frozen(names)
        for parameter in self.trainable.values():
            parameter.requires_grad_(True)
        self._evaluation_modules.freeze(
            lambda name: name in self.session_frozen or self._spec.is_frozen(name)
        )
        self._evaluation_modules.set_train_mode()

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
                    " freeze it in the loop, by session.freeze(patterns); or end the run with a checkpoint"
                    " and resume it with another `initial_weights.freeze`."
                )

    def build_metrics(self, phase: Phase) -> list[Metric]:
        metrics = build_metrics(self._spec, self._device, self._loss)
        named = [NamedLosses(self.objective, self._device)] if self.objective else []
        return [*metrics, *named]

    def traits(self) -> list[LayerTrait]:
        return model_traits(self.model)

    def untrainable_layer(self, inputs: Any, targets: Any) -> str | None:
        reached: list[str] = []
        if self.objective is not None and self.objective.step is not None:
            return None  # it may communicate, and this is called on some replicas
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
        has_call = self._spec.call is not None
        call = model_call(self._spec, "torch", self.model) if has_call else None
        self.call_in_eval_mode(export.write, self.model, form, target, inputs, call)

    def call_in_eval_mode(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Calls a function with the model in evaluation mode and without gradients."""
        self.model.eval()
        try:
            return self._without_gradients(compute, *args)
        finally:
            self._evaluation_modules.set_train_mode()

    def model_notes(self) -> list[str]:
        return self._local_buffers.notes() + self._evaluation_modules.notes()

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
        if self._loss is None:
            with torch.random.fork_rng(), self.carry.preserving_state():
                return self.evaluate(inputs, targets)[0][1, 1:]
        return self._loss.loss_denominators(targets)

    def backward(self, loss: torch.Tensor) -> None:
        (self._scaler.scale(loss) if self._scales_loss else loss).backward()
        separate_gradients(self.trainable.values())

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

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        self._rates.set_scheduled(rates)

    def momentum_setter(self) -> Callable[[float], None] | None:
        return momentum_setter(self.optimizer)

    def apply(self, norm: torch.Tensor | None = None) -> None:
        if self.needs_closure:
            raise SpecError(
                f"optimizer.custom: {type(self.optimizer).__name__}.step computes the loss several times, and"
                " only steps of strategy data-parallel can do that. Use that strategy, without gradients or"
                " session.apply_gradients, or an optimizer that needs no closure."
            )
        self._check_first_update()
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

    def clipping_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if self._clip is None or self._clip.global_norm is None:
            return None
        return nn.utils.get_total_norm(gradients)

    def apply_closure(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        def clipped() -> torch.Tensor:
            loss = closure()
            self._check_first_update()
            if self._clip is not None:
                clip_gradients(self.updated, self._clip)
            return loss

        loss: torch.Tensor = self.optimizer.step(clipped)
        return loss

    def _check_first_update(self) -> None:
        if not self._has_updated:
            self._has_updated = True
            self._require_no_new_weights()

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
        self._local_buffers.mark_start()

    def reseed(self, replica: int, step: int) -> None:
        shift = seed_offset(replica, step)
        torch.manual_seed((self._spec.seed + shift) & SEED_MASK)
        for generator, initial in zip(self._generators.values(), self._initial_seeds, strict=True):
            generator.manual_seed((initial + shift) & SEED_MASK)

    def generators(self) -> dict[str, StateAccess]:
        return {name: (each.get_state, each.set_state) for name, each in self._generators.items()}

    def local_buffers(self) -> dict[str, torch.Tensor]:
        return self._local_buffers.tensors

    def execution_state(self) -> dict[str, torch.Tensor]:
        return self._local_buffers.execution_state()

    def write_execution_state(self, name: str, value: torch.Tensor) -> None:
        self._local_buffers.write(name, value)

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


def _maybe_compiled(model: nn.Module, spec: TrainingSpec) -> Any:
    """The model, or its `torch.compile`d form; the compiler is imported late because it takes long."""
    if not spec.compile:
        return model
    from isotrain.adapters.torch.base.compile import compiled

    return compiled(model)


def loss_computer(
    call: Callable[..., Any], loss: TotalLoss | None
) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
    """Makes the function from inputs and targets to loss (shapes: see `LossModule`) and predictions."""
    assert loss is not None

    def compute(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        predictions = call(inputs)
        return loss(targets, predictions), predictions

    return compute
