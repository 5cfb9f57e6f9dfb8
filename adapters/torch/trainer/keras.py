"""Trainer of a portable (Keras 3) model on torch."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import keras
import torch

from isotrain.adapters.common.objective import Objective
from isotrain.adapters.common.outputs import OutputSelector, as_plain_tree
from isotrain.adapters.common.seeds import SEED_MASK, seed_offset
from isotrain.adapters.keras import carried_state as keras_carried_state
from isotrain.adapters.keras import files as keras_files
from isotrain.adapters.keras import layer_traits as keras_layer_traits
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras import weights as keras_weights
from isotrain.adapters.keras.batch_norm import normalize_ghost_batches, normalize_globally
from isotrain.adapters.keras.losses import Losses
from isotrain.adapters.keras.random_layers import draw_by_sample
from isotrain.adapters.keras.standalone_generators import standalone_generators
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.base.tensors import (
    make_contiguous,
    overwrite,
    restored_after,
    separate_gradients,
)
from isotrain.adapters.torch.graph.metrics.phase_metrics import CapturedMetrics
from isotrain.adapters.torch.graph.replay import GraphCache, eager_note
from isotrain.adapters.torch.graph.trace import Compute
from isotrain.adapters.torch.graph.traceability import UncapturableError
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.adapters.torch.metrics.named_losses import NamedLosses
from isotrain.adapters.torch.optim.keras_foreach import clipped_by, global_norm, keras_update
from isotrain.adapters.torch.trainer import export
from isotrain.adapters.torch.trainer.base import LossModule, ReplicaTrainer
from isotrain.adapters.torch.trainer.carried_state import Carry
from isotrain.adapters.torch.trainer.state import Section, StateAccess, in_place
from isotrain.adapters.torch.trainer.step_context import TorchStepContext
from isotrain.plugin import (
    ExportForm,
    IsotrainError,
    LayerTrait,
    Phase,
    SpecError,
    StateKind,
    TrainingSpec,
    UnsupportedError,
    unknown_name,
    weight_groups,
)


class KerasTrainer(ReplicaTrainer):
    """Trains a Keras model with its Keras optimizer, from captured graphs where these can be had.

    Attributes:
        optimizer: Keras optimizer.
        update: The optimizer's update by torch's foreach kernels; None where Keras itself updates.
        training: Function from inputs and targets to loss and predictions, in training mode.
        evaluation: Function from inputs and targets to loss and predictions, in evaluation mode.
        losses: Losses of each phase by output; empty where an objective computes the loss.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        model: keras.Model,
        frozen: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self.frozen_models = frozen
        self._take_model(spec, model)
        if not spec.updates:
            self._take_update(spec, self.trainable)

    def _take_model(self, spec: TrainingSpec, model: keras.Model) -> None:
        """Prepares the model for training."""
        self.model = model
        self._spec = spec
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        names = keras_weights.canonical_names(variables)
        self._by_name = dict(zip(names, variables, strict=True))
        self._tensors = {name: variable.value for name, variable in self._by_name.items()}
        trainable = names[: len(model.trainable_variables)]
        self.trainable = {name: self._tensors[name] for name in trainable}
        if spec.reproducible:
            make_contiguous(self.trainable, self._tensors.values())
        per_replica = {
            name: self._by_name[name]
            for name in spec.per_replica_names(trainable, names[len(trainable) :])
        }
        self.statistics = [
            v.value for v in keras_weights.moving_statistics(model, per_replica.values())
        ]
        self.self_updating = [v.value for v in keras_weights.self_updating_weights(model)]
        self._carried = keras_carried_state.carried_variables(model) | per_replica
        self.carry = Carry(
            keras_carried_state.layer_names(model),
            {name: variable.value for name, variable in self._carried.items()},
            next(iter(self._tensors.values())).device,
            keras_carried_state.base_layer_attributes(),
        )
        self._call = keras_model.keras_call(spec, "torch", model)
        keras_private.register_weights(keras_private.layers_of(model))
        self._without_gradients = WithoutGradients()
        self._seed_shift = 0
        self._standalone_seeds = {
            name: each.state.value
            for name, each in standalone_generators(spec, "torch", model).items()
        }
        self._initial_seeds: list[tuple[torch.Tensor, torch.Tensor]] = []
        keras_weights.lock_trainable(model)
        self._freezing = keras_weights.Freezing(model)

    def _take_update(self, spec: TrainingSpec, names: Collection[str]) -> None:
        """Builds what the weights of these names are trained by."""
        self._spec = spec
        self.step = TorchStepContext(spec, self.frozen_models)
        self.objective = Objective.of(spec, "torch", self.step)
        if spec.batch_norm == "global":
            normalize_globally(keras_private.layers_of(self.model), self.step)
        if self.step.has_ghost_batches:
            normalize_ghost_batches(keras_private.layers_of(self.model), self.step)
        if spec.random_layers == "per-sample":
            draw_by_sample()
        self.trainable = {name: self._tensors[name] for name in self.trainable if name in names}
        self.frozen = {n: each for n, each in self._tensors.items() if n not in self.trainable}
        self._variables = [self._by_name[name] for name in self.trainable]
        self._non_trainable = [self._by_name[name] for name in self.frozen]
        self._updated_variables = self._variables
        self._updated_names = list(self.trainable)
        self._unsharded_slots: set[str] = set()
        self._remote_slots: set[str] = set()
        self._global_clipnorm: float | None = None
        self._group_rates: dict[int, float] = {}
        self._build_optimizer()
        self.losses: dict[Phase, Losses] = {}
        self.training = self._graph_cache(spec, training=True)
        self.evaluation = self._graph_cache(spec, training=False)
        self.loss_module = LossModule(self.model, self.training, self._tensors.values())

    def for_update(self, spec: TrainingSpec, names: Collection[str]) -> Self:
        trainer = copy.copy(self)
        trainer._take_update(spec, names)
        return trainer

    def _build_optimizer(self, name: str | None = None) -> None:
        """Builds the optimizer of the variables that this replica updates."""
        self.optimizer, self.optimizer_lr_schedule = keras_model.build_optimizer(
            self._spec, "torch", name, list(self.trainable)
        )
        self._unsharded_slots = set(keras_weights.canonical_names(self.optimizer.variables))
        self._build_optimizer_state()
        self._scale = keras_model.loss_scale(self.optimizer)

    def _build_optimizer_state(self) -> None:
        """Builds the optimizer's state variables for the variables that this replica updates."""
        spec, variables = self._spec, self._updated_variables
        self.updated = [variable.value for variable in variables]
        self.optimizer.build(variables)
        groups = self._option_groups = self._use_groups()
        is_constrained = any(variable.constraint is not None for variable in self._variables)
        has_kernels = self._takes_kernels and not is_constrained  # the same on all replicas
        self.update = (
            keras_update(spec, self.optimizer, variables, groups=groups) if has_kernels else None
        )

    @property
    def _takes_kernels(self) -> bool:
        """Whether torch's kernels update, where they can: always with `reproducible`, for the same bits."""
        return self._spec.capture or self._spec.reproducible is not None

    def _use_groups(self) -> list[keras_private.OptionGroup]:
        """Makes the optimizer, built, update by the spec's groups; returns those of the updated variables."""
        groups = weight_groups(self._spec.optimizer, list(self.trainable), self._updated_names)
        return keras_model.use_groups(self._spec, self.optimizer, groups, self._group_rates)

    def shard_optimizer(self, indices: Sequence[int]) -> None:
        before = self._slots().keys()
        self._updated_variables = [self._variables[index] for index in indices]
        names = list(self.trainable)
        self._updated_names = [names[index] for index in indices]
        self._build_optimizer(self.optimizer.name)
        self._remote_slots = before - self._slots().keys()
        self._global_clipnorm, self.optimizer.global_clipnorm = self.optimizer.global_clipnorm, None

    def set_frozen(self, names: Collection[str]) -> None:
        super().set_frozen(names)
        self._freezing.set_frozen(names)
        trained = {
            n: v for n, v in zip(self.trainable, self._variables, strict=True) if n not in names
        }
        self._updated_names, self._updated_variables = list(trained), list(trained.values())
        self.updated = [variable.value for variable in self._updated_variables]
        self.update = None  # torch's kernels go through all weights
        if len(trained) == len(self.trainable) and self._takes_kernels:
            self.update = keras_update(
                self._spec, self.optimizer, self._variables, groups=self._option_groups
            )
        for cache in self._graph_caches().values():
            cache.forget()

    def changing_statistics(self) -> list[torch.Tensor]:
        if not self.statistics:  # going through the layers takes longer
            return []
        changing = {id(v.value) for v in keras_weights.moving_statistics(self.model)}
        return [each for each in super().changing_statistics() if id(each) in changing]

    def is_local_slot(self, slot: str) -> bool:
        return bool(self._remote_slots) and slot not in self._unsharded_slots

    def is_remote_slot(self, slot: str) -> bool:
        return slot in self._remote_slots

    def build_metrics(self, phase: Phase) -> list[Metric]:
        outputs = OutputSelector.of_keras(self.model)
        metrics = CapturedMetrics.of(self._spec, outputs, self.losses[phase])
        compute = self.training if phase == "train" else self.evaluation
        if isinstance(compute, GraphCache):
            compute.measure(metrics)
        device = next(iter(self.trainable.values())).device
        named = [NamedLosses(self.objective, device)] if self.objective else []
        return [*metrics.metrics, *named]

    def traits(self) -> list[LayerTrait]:
        return keras_layer_traits.model_traits(self.model, self._spec.precision)

    def _graph_cache(self, spec: TrainingSpec, training: bool) -> Compute:
        compute = self._make_loss_computer(spec, training)
        phase = "training" if training else "evaluation"
        if not spec.capture and spec.compile:
            raise SpecError(
                "compile: for a portable model on torch, the captured graph is compiled, and capture is"
                " false. Leave one of the two out."
            )
        takes_step = self.objective is not None and self.objective.step is not None
        communicates = takes_step or spec.batch_norm == "global"
        is_captured = spec.capture and not (training and spec.recompute) and not communicates
        if not is_captured:
            return compute
        carried = list(self._carried.values())
        return GraphCache(
            self._refusing_named_losses(compute),
            self.model,
            phase,
            spec.compile,
            compute.callables,
            carried,
            optimizes=spec.reproducible is None,
        )

    def _refusing_named_losses(self, compute: Compute) -> Compute:
        """The computation, which cannot be captured where an objective returns named losses."""
        objective = self.objective
        if objective is None:
            return compute

        def compute_objective(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
            result = compute(inputs, targets)
            if objective.names and private_api.is_tracing():
                raise UncapturableError("the objective returns named losses, which are recorded")
            return result

        return compute_objective

    def _make_loss_computer(self, spec: TrainingSpec, training: bool) -> keras_model.LossComputer:
        """Makes the function from inputs and targets to loss and predictions, as Keras computes them."""
        compute = keras_model.loss_computer(
            spec,
            self.model,
            "torch",
            training=training,
            with_denominators=True,
            objective=self.objective,
        )
        compute = replace(compute, compute=self.step.drawing(compute.compute))
        self.losses["train" if training else "evaluation"] = compute.losses
        if training and self._carried:
            carried = list(self._carried.values())
            variables = keras_carried_state.distinct(
                [*self._variables, *self._non_trainable, *carried]
            )
            return replace(
                compute, compute=keras_carried_state.carrying(compute.compute, variables, carried)
            )
        return compute

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        graph_caches = self._graph_caches().values()
        notes = [text for each in graph_caches for text in each.notes(inputs, targets)]
        if self._spec.capture and self._spec.recompute:
            notes.append(
                eager_note(
                    "training", "a captured graph would keep the activations that `recompute` drops"
                )
            )
        if self._spec.capture and self.objective is not None and self.objective.step is not None:
            notes.append(eager_note("training and evaluation", "the objective takes the step"))
        return notes

    def evaluate(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        result: tuple[torch.Tensor, Any] = self._without_gradients(self.evaluation, inputs, targets)
        return result

    def predict(self, inputs: Any) -> Any:
        forward = functools.partial(self._call, training=False)
        return as_plain_tree(self._without_gradients(forward, inputs))

    def has_own_denominator(self, inputs: Any, targets: Any) -> bool:
        with restored_after(list(self.carry.variables.values())):
            return bool(self.evaluate(inputs, targets)[0].dim())

    def loss_denominators(self, inputs: Any, targets: Any) -> torch.Tensor:
        with restored_after(list(self.carry.variables.values())):
            return self.evaluate(inputs, targets)[0][1, 1:]

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        if form == "torch":
            self._require_registered()
            export.write(self.model, form, target, inputs)
        else:
            keras_files.write(self.model, form, target, inputs)

    def _require_registered(self) -> None:
        """Refuses a `state_dict` that would lack weights.

        Raises:
            UnsupportedError: Some weights of the model are not registered in its torch module.
        """
        missing = set(map(id, self.loss_module.unregistered))
        named = (self.trainable | self.frozen).items()
        if names := [name for name, tensor in named if id(tensor) in missing]:
            raise UnsupportedError(
                "export: the state_dict of a Keras model names weights by their path, and other weights have"
                f" the path of {', '.join(names)}. Give the layers unique names, or export it as keras or"
                " safetensors."
            )

    def backward(self, loss: torch.Tensor) -> None:
        if self._scale is not None:
            loss = self.optimizer.scale_loss(loss)
        loss.backward()
        separate_gradients(self.trainable.values())

    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else float(self._scale)

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.learning_rate.assign(rate)
        if self.update is not None:
            self.update.rate = rate

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        self._group_rates.update(rates)

    def momentum_setter(self) -> Callable[[float], None] | None:
        return keras_model.momentum_setter(self.optimizer, self._spec)

    def apply(self, norm: torch.Tensor | None = None) -> None:
        with torch.no_grad():
            gradients = [parameter.grad for parameter in self.updated]
            if norm is not None and self._global_clipnorm is not None:
                gradients, norm = clipped_by(norm, gradients, self._global_clipnorm), None
            if self.update is None:
                self.optimizer.apply(gradients, self._updated_variables)
            elif any(gradient is None for gradient in gradients):  # Keras warns of these
                self.optimizer.apply(gradients, self._updated_variables)
                self.update.forget()
            else:
                self.update(gradients, norm)

    def clipping_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if self._global_clipnorm is None and self.optimizer.global_clipnorm is None:
            return None
        if self.update is None:
            return keras_model.global_norm(gradients)
        return global_norm([gradient.contiguous() for gradient in gradients])

    def weight_finalizer(self) -> Callable[[], None] | None:
        return keras_model.weight_finalizer(self.optimizer, self._updated_variables)

    def seed_replica(self, replica: int) -> None:
        torch.manual_seed(torch.initial_seed() + replica)
        seeds = [value for name, value in self.frozen.items() if keras_private.is_seed(name)]
        seeds += self._standalone_seeds.values()
        self._initial_seeds = [(seed, seed.detach().clone()) for seed in seeds]
        self._seed_shift = seed_offset(replica)
        self._shift_seeds(self._seed_shift)

    def reseed(self, replica: int, step: int) -> None:
        shift = seed_offset(replica, step)
        torch.manual_seed((self._spec.seed + shift) & SEED_MASK)
        self._shift_seeds(shift)

    def _shift_seeds(self, shift: int) -> None:
        """Sets the seeds of random layers to the initial ones, which all replicas share, plus a shift."""
        with torch.no_grad():
            for seed, initial in self._initial_seeds:
                seed.copy_(_shift_seed(initial, shift))

    def generators(self) -> dict[str, StateAccess]:
        return {
            name: (seed.clone, functools.partial(overwrite, f"random/{name}", seed))
            for name, seed in self._standalone_seeds.items()
        }

    def close(self) -> None:
        keras_weights.unlock_trainable(self.model)

    def sections(self) -> dict[StateKind, Section]:
        """State of the trainer by kind; seeds of random layers as replica 0 has them."""
        return super().sections() | {
            "non-trainable": Section(self._read_unshifted, self._write_unshifted)
        }

    def execution_state(self) -> dict[str, torch.Tensor]:
        return {name: cache.call_counts() for name, cache in self._graph_caches().items()}

    def write_execution_state(self, name: str, value: torch.Tensor) -> None:
        self._graph_caches()[name].resume_from(value)

    def capture_now(self) -> None:
        for cache in self._graph_caches().values():
            cache.capture_now()

    def _graph_caches(self) -> dict[str, GraphCache]:
        phases = {"replays/training": self.training, "replays/evaluation": self.evaluation}
        return {name: each for name, each in phases.items() if isinstance(each, GraphCache)}

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        for each in self._graph_caches().values():
            each.is_paused = True
        try:
            yield
        finally:
            for each in self._graph_caches().values():
                each.is_paused = False

    def _read_unshifted(self) -> dict[str, torch.Tensor]:
        """Non-trainable weights by name, in their shapes; seeds, shape `[2]`, without the replica's shift."""
        return {
            name: _shift_seed(value, -self._seed_shift) if keras_private.is_seed(name) else value
            for name, value in self.frozen.items()
        }

    def _write_unshifted(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a non-trainable weight by a value of its shape; a seed gets this replica's shift."""
        is_seed = keras_private.is_seed(name) and value.shape == (2,)
        shifted = _shift_seed(value, self._seed_shift) if is_seed else value
        in_place(self.frozen).write(name, shifted)

    def _slots(self) -> dict[str, Any]:
        scale = {id(variable) for variable in self._scale_variables().values()}
        variables = [v for v in self.optimizer.variables if id(v) not in scale]
        return dict(zip(keras_weights.canonical_names(variables), variables, strict=True))

    def _scale_variables(self) -> dict[str, Any]:
        return keras_model.loss_scale_variables(self.optimizer)

    def loss_scale_state(self) -> dict[str, torch.Tensor]:
        return {name: variable.value for name, variable in self._scale_variables().items()}

    def write_loss_scale(self, name: str, value: torch.Tensor) -> None:
        in_place(self.loss_scale_state(), "loss-scale/").write(name, value)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return {name: variable.value for name, variable in self._slots().items()}

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        slots = self._slots()
        if name not in slots:
            raise IsotrainError(unknown_name("optimizer slot", name, slots))
        overwrite(f"optimizer/{name}", slots[name].value, value)
        if self.update is not None:
            self.update.forget()


def _shift_seed(state: torch.Tensor, shift: int) -> torch.Tensor:
    """Adds to the seed in a seed generator's state, shape `[2]`; empty storage (another stage's) stays."""
    if not shift or not state.untyped_storage().nbytes():
        return state
    shifted = state.detach().clone()
    shifted[0] = (int(shifted[0]) + shift) & SEED_MASK
    return shifted
