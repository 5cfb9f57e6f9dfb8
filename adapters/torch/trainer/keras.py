"""A portable (Keras 3) model on torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import torch

from isotrain.adapters.common.outputs import OutputSelector, as_plain_tree
from isotrain.adapters.common.seeds import SEED_MASK, seed_offset
from isotrain.adapters.keras import carried_state as keras_carried_state
from isotrain.adapters.keras import files as keras_files
from isotrain.adapters.keras import layer_traits as keras_layer_traits
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.losses import Losses
from isotrain.adapters.keras.rng import standalone_generators
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.base.tensors import overwrite, restored_after
from isotrain.adapters.torch.graph.metrics.phase_metrics import CapturedMetrics
from isotrain.adapters.torch.graph.replay import GraphCache, eager_note
from isotrain.adapters.torch.graph.trace import Compute
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.adapters.torch.optim.keras_foreach import clipped_by, keras_update
from isotrain.adapters.torch.trainer import export
from isotrain.adapters.torch.trainer.base import LossModule, ReplicaTrainer
from isotrain.adapters.torch.trainer.carried_state import Carry
from isotrain.adapters.torch.trainer.state import Section, State, in_place
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
)


class KerasTrainer(ReplicaTrainer):
    """Drives a Keras model with its Keras optimizer, replayed from a record where that can be had.

    Attributes:
        optimizer: Keras'.
        update: Does what it does by torch's kernels; None where it must do it.
        training: Computes mean loss and predictions.
        evaluation: The same, in evaluation mode.
        losses: That these compute, by output; none where an objective gives them.
    """

    def __init__(self, spec: TrainingSpec, model: keras.Model) -> None:
        self.model = model
        self._spec = spec
        self._variables = list(model.trainable_variables)
        self._others = list(model.non_trainable_variables)
        names = keras_model.canonical_names(self._variables + self._others)
        tensors = [variable.value for variable in self._variables + self._others]
        count = len(self._variables)
        self.trainable = dict(zip(names[:count], tensors[:count], strict=True))
        self.frozen = dict(zip(names[count:], tensors[count:], strict=True))
        self.statistics = [v.value for v in keras_model.moving_statistics(model)]
        self.self_updating = [v.value for v in keras_model.self_updating_weights(model)]
        self._carried = keras_carried_state.carried_variables(model)
        self.carry = Carry(
            keras_carried_state.layer_names(model),
            {name: variable.value for name, variable in self._carried.items()},
            tensors[0].device,
            keras_carried_state.base_layer_attributes(),
        )
        self._updated_variables = self._variables
        self._shared_slots: set[str] = set()
        self._slots_elsewhere: set[str] = set()
        self._bound: float | None = None
        self._make_optimizer()
        self.losses: dict[Phase, Losses] = {}
        self.training = self._graph_cache(spec, training=True)
        self.evaluation = self._graph_cache(spec, training=False)
        keras_private.register_weights(keras_private.layers_of(model))
        self.loss_module = LossModule(model, self.training, tensors)
        self._without_gradients = WithoutGradients()
        self._seed_shift = 0
        self._seeds_apart = {
            name: each.state.value
            for name, each in standalone_generators(spec, "torch", model).items()
        }
        self._first_seeds: list[tuple[torch.Tensor, torch.Tensor]] = []
        keras_model.lock_trainable(model)

    def _make_optimizer(self, name: str | None = None) -> None:
        """Makes an optimizer of the variables that are updated here."""
        self.optimizer, self.optimizer_lr_schedule = keras_model.build_optimizer(
            self._spec, "torch", name
        )
        self._shared_slots = set(keras_model.canonical_names(self.optimizer.variables))
        self._make_slots()
        self._scale = keras_model.loss_scale(self.optimizer)

    def _make_slots(self) -> None:
        """Gives the optimizer slots for the variables that are updated here."""
        spec, variables = self._spec, self._updated_variables
        self.updated = [variable.value for variable in variables]
        self.optimizer.build(variables)
        self.update = keras_update(spec, self.optimizer, variables) if spec.capture else None

    def shard_optimizer(self, places: Sequence[int]) -> None:
        before = self._slots().keys()
        self._updated_variables = [self._variables[place] for place in places]
        self._make_optimizer(self.optimizer.name)
        self._slots_elsewhere = before - self._slots().keys()
        self._bound, self.optimizer.global_clipnorm = self.optimizer.global_clipnorm, None

    def is_local_slot(self, slot: str) -> bool:
        return bool(self._slots_elsewhere) and slot not in self._shared_slots

    def is_remote_slot(self, slot: str) -> bool:
        return slot in self._slots_elsewhere

    def build_metrics(self, phase: Phase) -> list[Metric]:
        outputs = OutputSelector.of_keras(self.model)
        found = CapturedMetrics.of(self._spec, outputs, self.losses[phase])
        computes = self.training if phase == "train" else self.evaluation
        if isinstance(computes, GraphCache):
            computes.measure(found)
        return found.metrics

    def traits(self) -> list[LayerTrait]:
        return keras_layer_traits.model_traits(self.model, self._spec.precision)

    def _graph_cache(self, spec: TrainingSpec, training: bool) -> Compute:
        compute = self._computer(spec, training)
        phase = "training" if training else "evaluation"
        if not spec.capture and spec.compile:
            raise SpecError(
                "compile: of a portable model on torch, the record is compiled, and record is false."
                " Leave one of the two out."
            )
        is_recorded = spec.capture and not (training and spec.recompute)
        if not is_recorded:
            return compute
        carried = list(self._carried.values())
        return GraphCache(compute, self.model, phase, spec.compile, compute.callables, carried)

    def _computer(self, spec: TrainingSpec, training: bool) -> keras_model.LossComputer:
        """What Keras computes in a phase."""
        compute = keras_model.loss_computer(
            spec, self.model, "torch", training=training, with_denominators=True
        )
        self.losses["train" if training else "evaluation"] = compute.losses
        if training and self._carried:
            carried = list(self._carried.values())
            variables = [*self._variables, *self._others, *carried]
            return replace(
                compute, compute=keras_carried_state.carrying(compute.compute, variables, carried)
            )
        return compute

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        replays = self._replays().values()
        found = [text for each in replays for text in each.notes(inputs, targets)]
        if self._spec.capture and self._spec.recompute:
            found.append(
                eager_note("training", "a record would keep what `recompute` wants computed again")
            )
        return found

    def evaluate(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        found: tuple[torch.Tensor, Any] = self._without_gradients(self.evaluation, inputs, targets)
        return found

    def predict(self, inputs: Any) -> Any:
        forward = functools.partial(self.model, training=False)
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
        """Refuses a state_dict that would lack weights.

        Raises:
            UnsupportedError: Torch does not know all weights of the model.
        """
        missing = set(map(id, self.loss_module.unregistered))
        named = (self.trainable | self.frozen).items()
        if names := [name for name, tensor in named if id(tensor) in missing]:
            raise UnsupportedError(
                "export: the state_dict of a Keras model names weights by their path, and others have that"
                f" of {', '.join(names)}. Give the layers names of their own, or export it as keras or"
                " safetensors."
            )

    def backward(self, loss: torch.Tensor) -> None:
        if self._scale is not None:
            loss = self.optimizer.scale_loss(loss)
        loss.backward()

    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else float(self._scale)

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.learning_rate.assign(rate)
        if self.update is not None:
            self.update.rate = rate

    def apply(self, norm: torch.Tensor | None = None) -> None:
        with torch.no_grad():
            gradients = [parameter.grad for parameter in self.updated]
            if norm is not None and self._bound is not None:
                gradients = clipped_by(norm, gradients, self._bound)
            if self.update is None:
                self.optimizer.apply(gradients, self._updated_variables)
            elif any(gradient is None for gradient in gradients):  # of which Keras warns
                self.optimizer.apply(gradients, self._updated_variables)
                self.update.forget()
            else:
                self.update(gradients)

    def weight_finalizer(self) -> Callable[[], None] | None:
        return keras_model.weight_finalizer(self.optimizer, self._updated_variables)

    def seed_replica(self, replica: int) -> None:
        torch.manual_seed(torch.initial_seed() + replica)
        seeds = [value for name, value in self.frozen.items() if keras_private.is_seed(name)]
        seeds += self._seeds_apart.values()
        self._first_seeds = [(seed, seed.detach().clone()) for seed in seeds]
        self._seed_shift = seed_offset(replica)
        self._begin_seeds(self._seed_shift)

    def reseed(self, replica: int, step: int) -> None:
        shift = seed_offset(replica, step)
        torch.manual_seed((self._spec.seed + shift) & SEED_MASK)
        self._begin_seeds(shift)

    def _begin_seeds(self, shift: int) -> None:
        """Moves the seeds of random layers from where all replicas had them at the start."""
        with torch.no_grad():
            for seed, first in self._first_seeds:
                seed.copy_(_moved(first, shift))

    def generators(self) -> dict[str, State]:
        return {
            name: (seed.clone, functools.partial(overwrite, f"random/{name}", seed))
            for name, seed in self._seeds_apart.items()
        }

    def close(self) -> None:
        keras_model.unlock_trainable(self.model)

    def sections(self) -> dict[StateKind, Section]:
        """The state that it has itself: seeds of random layers as replica 0 has them."""
        return super().sections() | {"non-trainable": Section(self._shared, self._write_shared)}

    def execution_state(self) -> dict[str, torch.Tensor]:
        return {name: replayed.call_counts() for name, replayed in self._replays().items()}

    def write_execution_state(self, name: str, value: torch.Tensor) -> None:
        self._replays()[name].resume_from(value)

    def capture_now(self) -> None:
        for replayed in self._replays().values():
            replayed.capture_now()

    def _replays(self) -> dict[str, GraphCache]:
        phases = {"replays/training": self.training, "replays/evaluation": self.evaluation}
        return {name: each for name, each in phases.items() if isinstance(each, GraphCache)}

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        for each in self._replays().values():
            each.is_paused = True
        try:
            yield
        finally:
            for each in self._replays().values():
                each.is_paused = False

    def _shared(self) -> dict[str, torch.Tensor]:
        return {
            name: _moved(value, -self._seed_shift) if keras_private.is_seed(name) else value
            for name, value in self.frozen.items()
        }

    def _write_shared(self, name: str, value: torch.Tensor) -> None:
        is_seed = keras_private.is_seed(name) and value.shape == (2,)
        moved = _moved(value, self._seed_shift) if is_seed else value
        in_place(self.frozen).write(name, moved)

    def _slots(self) -> dict[str, Any]:
        scale = {id(variable) for variable in self._scale_variables().values()}
        variables = [v for v in self.optimizer.variables if id(v) not in scale]
        return dict(zip(keras_model.canonical_names(variables), variables, strict=True))

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


def _moved(state: torch.Tensor, shift: int) -> torch.Tensor:
    """The state of a seed generator with its seed moved; as it is where another stage alone has it."""
    if not shift or not state.untyped_storage().nbytes():
        return state
    moved = state.detach().clone()
    moved[0] = (int(moved[0]) + shift) & SEED_MASK
    return moved
