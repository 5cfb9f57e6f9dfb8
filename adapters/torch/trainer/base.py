"""Trainer of one torch replica: model, loss, optimizer and named state; knows nothing of other replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn

from isotrain.adapters.common.objective import Objective
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.adapters.torch.trainer.carried_state import Carry
from isotrain.adapters.torch.trainer.state import Section, StateAccess, in_place
from isotrain.adapters.torch.trainer.step_context import TorchStepContext
from isotrain.plugin import (
    ExportForm,
    IsotrainError,
    LayerTrait,
    Phase,
    StateKind,
    StatePart,
    TrainingSpec,
    Trait,
    unknown_name,
)


class LossModule(nn.Module):
    """A module whose forward pass returns the loss and the predictions of a model, which may be None.

    The loss has one of three shapes, in the loss's dtype:

    * `[]`: the mean over the samples, where all targets have equal weight.
    * `[2, 1 + losses]`: row 0 has the sum of the losses that are means over the samples, then the mean of
      each loss that is divided by something else; row 1 has the denominators of the latter.
    * `[2]`, where padding may be left out (`ReplicaTrainer.may_ignore_padding`): the mean as if padding
      counted and had a loss of 0, and the fraction of padding among the targets.

    Attributes:
        unregistered: Weights that are not parameters of the model; this module registers them.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[..., tuple[torch.Tensor, Any]],
        weights: Iterable[nn.Parameter] = (),
    ) -> None:
        """Wraps a model.

        Args:
            model: Model to train.
            compute: Forward pass: function from inputs and targets to the loss and the predictions.
            weights: Weights of the model; those that it does not register as parameters are registered here.
        """
        super().__init__()
        self.model = model
        self.forward = compute
        registered = set(map(id, model.parameters()))
        self.unregistered = nn.ParameterList(w for w in weights if id(w) not in registered)


class UpdateSwitch:
    """Switch between the named updates of a model: the weights of one of them require gradients."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        """Takes the weights, any shapes, that any update trains."""
        self._weights = list(weights)
        self._current: ReplicaTrainer | None = None

    def turn_to(self, trainer: ReplicaTrainer) -> None:
        """Lets exactly the trainable weights of a trainer require gradients, until another one's turn."""
        if self._current is not trainer:
            self._current = trainer
            trained = set(map(id, trainer.trainable.values()))
            for weight in self._weights:
                weight.requires_grad_(id(weight) in trained)


class ReplicaTrainer(ABC):
    """Model, loss and optimizer of one replica, Keras or native torch. All methods are local.

    Attributes:
        model: Model as the user's function built it.
        loss_module: Module whose forward pass, in training mode, returns loss and predictions.
        trainable: Trainable parameters by canonical name.
        frozen: All other tensors of the model by canonical name.
        aliases: Further names of tied weights, by canonical name.
        statistics: Moving statistics in `frozen`, which forward passes change; averaged over replicas.
        self_updating: Tensors of `frozen` that the model itself changes, also in evaluation mode.
        carry: State that layers carry from one call to the next, `per_replica` weights among it.
        updated: Trainable parameters that `apply` updates: all, or this replica's shard (ZeRO).
        needs_closure: Whether the optimizer computes the loss itself, several times in a step.
        optimizer_lr_schedule: Learning-rate schedule built into the optimizer: step to rate; None if none.
        switch: Switch to this trainer from those of other updates of the model; None if it has no others.
        session_frozen: Names of the weights that `session.freeze` has frozen.
        frozen_models: Frozen models that objectives get, by name.
        step: Step context that objectives get.
        objective: The spec's objective; None where it has a loss.
    """

    model: Any
    loss_module: LossModule
    optimizer_lr_schedule: Callable[[int], float] | None = None
    needs_closure: bool = False
    trainable: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    statistics: list[torch.Tensor]
    self_updating: list[torch.Tensor]
    carry: Carry
    updated: list[Any]
    frozen_models: Mapping[str, Callable[..., Any]]
    step: TorchStepContext
    objective: Objective | None
    switch: UpdateSwitch | None = None
    session_frozen: Collection[str] = ()

    def set_frozen(self, names: Collection[str]) -> None:
        """Freezes exactly these weights within the run, as `FreezingGroup.set_frozen`."""
        self.session_frozen = frozenset(names)

    def changing_statistics(self) -> list[torch.Tensor]:
        """Moving statistics that training steps change: not those of frozen layers."""
        frozen = {id(self.frozen[n]) for n in self.session_frozen if n in self.frozen}
        return [each for each in self.statistics if id(each) not in frozen]

    @abstractmethod
    def for_update(self, spec: TrainingSpec, names: Collection[str]) -> Self:
        """Trainer of the same model that trains some of its weights by the objective and optimizer of a spec.

        Args:
            spec: Spec of one of several updates.
            names: Names of the weights to train.
        """

    def begin_step(self) -> None:
        """Lets the weights that this trainer trains require gradients, where others train the same model."""
        if self.switch is not None:
            self.switch.turn_to(self)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by name, any shape, that must be equal on all replicas at the start."""
        registered = dict(self.loss_module.named_parameters())
        registered |= dict(self.loss_module.named_buffers())
        return self.trainable | self.frozen | registered

    def part(self, name: StatePart) -> list[torch.Tensor]:
        """Tensors, any shapes, of one part of the state (see `StatePart`); strategies set these in place."""
        if name == "trainable":
            return list(self.trainable.values())
        if name == "statistics":
            return self.statistics
        if name == "changing-statistics":
            return self.changing_statistics()
        slots = self.optimizer_state().values()
        return [slot for slot in slots if slot.is_floating_point() and slot.dim()]

    def optimizer_rates(self) -> tuple[float, float] | None:
        """Learning rates of the last and the next update; None unless the optimizer sets its own."""
        return None

    @abstractmethod
    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        """Sets the rates of later updates by the schedules of optimizer groups, by index of the group."""

    def momentum_setter(self) -> Callable[[float], None] | None:
        """Function that sets the optimizer's momentum for later updates; None if it has none."""
        return None

    def weight_finalizer(self) -> Callable[[], None] | None:
        """The optimizer's end-of-training weight update (as an average of weights); None if it has none."""
        return None

    def without_gradient(self) -> list[LayerTrait]:
        """Trainable weights that got no gradient in the last step; none before the first step."""
        has_gradient = {
            name: weight.grad is not None
            for name, weight in self.trainable.items()
            if name not in self.session_frozen
        }
        if not any(has_gradient.values()):
            return []
        kind = type(self.model).__name__
        missing = (name for name, has_one in has_gradient.items() if not has_one)
        return [LayerTrait(Trait.WITHOUT_GRADIENT, name, kind) for name in missing]

    def untrainable_layer(self, inputs: Any, targets: Any) -> str | None:
        """Name of the layer that cannot be trained on so few samples, if any: runs a forward pass."""
        return None

    def zero_gradients(self) -> None:
        """Sets the gradients to None."""
        for parameter in self.trainable.values():
            parameter.grad = None

    @abstractmethod
    def build_metrics(self, phase: Phase) -> list[Metric]:
        """Builds the spec's metrics for a phase; they replace that phase's earlier ones."""

    @abstractmethod
    def traits(self) -> list[LayerTrait]:
        """Traits of the model's layers that bear on whether backends agree."""

    @abstractmethod
    def evaluate(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Loss (shapes: see `LossModule`) and predictions in evaluation mode, without gradients."""

    @abstractmethod
    def has_own_denominator(self, inputs: Any, targets: Any) -> bool:
        """Whether the loss of such slices is divided by more than the sample count; no state changes."""

    @property
    def may_ignore_padding(self) -> bool:
        """Whether the loss may leave out padding, and then has shape `[2]`: see `LossModule`."""
        return False

    def padding_fraction(self, targets: Any) -> torch.Tensor:
        """Fraction of padding among the targets of a slice, a float64 scalar."""
        return torch.zeros((), dtype=torch.float64)

    def set_split(self, is_split: bool) -> None:
        """Sets whether a step's batch is split into several slices, as it is by default."""
        return

    @abstractmethod
    def loss_denominators(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Denominators of a slice's losses that are not means over samples, shape `[losses]`."""

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """Predictions in evaluation mode, without gradients: a tensor or a tree of tensors."""

    @abstractmethod
    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        """Writes the model in an export form; see `ReplicaGroup.export`."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a scalar loss, times the loss scale, to the parameters' `.grad`."""

    @abstractmethod
    def loss_scale(self) -> float:
        """Loss scale by which the gradients in `.grad` are multiplied; 1 without loss scaling."""

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Sets the learning rate of the following updates."""

    @abstractmethod
    def apply(self, norm: torch.Tensor | None = None) -> None:
        """Clips the parameters' gradients and updates the weights.

        Args:
            norm: Global norm of the gradients of all weights, a scalar, to clip by. Needed where this replica
                updates some of the weights; elsewhere None stands for one that is computed here.
        """

    @abstractmethod
    def clipping_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Global norm for `apply`, a scalar, with the bits of one that updates all weights.

        Args:
            gradients: Gradients of all trainable weights, in their shapes.

        Returns:
            None unless the spec clips by global norm.
        """

    def apply_closure(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Updates the weights by an optimizer that needs a closure.

        Args:
            closure: Function that computes the reduced gradients into `.grad` and returns the mean loss.

        Returns:
            Mean loss before the update, a scalar.
        """
        raise NotImplementedError

    @abstractmethod
    def shard_optimizer(self, indices: Sequence[int]) -> None:
        """Updates some weights only from now on, and keeps optimizer state for these alone (ZeRO).

        Args:
            indices: Indices of these weights in `trainable`.
        """

    @abstractmethod
    def is_local_slot(self, slot: str) -> bool:
        """Whether an optimizer state tensor belongs to a weight that this replica alone updates."""

    @abstractmethod
    def is_remote_slot(self, slot: str) -> bool:
        """Whether an optimizer state tensor belongs to a weight that only another replica updates."""

    def model_notes(self) -> list[str]:
        """Notes for the plan on how the model is used."""
        return []

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        """Notes for the plan on how steps on such slices are computed; no state changes."""
        return []

    @abstractmethod
    def seed_replica(self, replica: int) -> None:
        """Gives this replica its own random stream (for dropout)."""

    @abstractmethod
    def reseed(self, replica: int, step: int) -> None:
        """Sets the random stream to that of a replica in a step, whatever was drawn before."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Optimizer state by canonical name, without the prefix `optimizer/`: scalars, or weights' shapes."""

    @abstractmethod
    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        """Sets one optimizer state tensor; `value` has its shape."""

    @abstractmethod
    def loss_scale_state(self) -> dict[str, torch.Tensor]:
        """Scalars `scale`, the loss scale, and `steps`, those since it changed; empty without one."""

    @abstractmethod
    def write_loss_scale(self, name: str, value: torch.Tensor) -> None:
        """Sets one entry of `loss_scale_state`, a scalar."""

    def generators(self) -> dict[str, StateAccess]:
        """Access by name to the model's own random generators whose states are not weights."""
        return {}

    def local_buffers(self) -> dict[str, torch.Tensor]:
        """Floating-point buffers by name, any shape, that are not synchronised between replicas."""
        return {}

    def execution_state(self) -> dict[str, torch.Tensor]:
        """State of any shape that, besides the weights, decides how the next step rounds (call counts)."""
        return {}

    def write_execution_state(self, name: str, value: torch.Tensor) -> None:
        """Restores one entry of `execution_state`, in its shape.

        Raises:
            IsotrainError: There is no state of that name.
        """
        raise IsotrainError(unknown_name("state", f"execution/{name}", self.execution_state()))

    def capture_now(self) -> None:
        """Skips the warm-up before graph capture, so that no step depends on earlier ones."""
        return

    def eagerly(self) -> AbstractContextManager[None]:
        """Context in which it computes eagerly: captured graphs are neither used nor counted."""
        return nullcontext()

    def close(self) -> None:
        """Ends the run's hold on the model: its trainable attributes may be changed again."""
        return

    def not_checkpointed(self) -> list[str]:
        """Descriptions of what steps depend on and checkpoints lack."""
        return []

    def sections(self) -> dict[StateKind, Section]:
        """State of the trainer by kind."""
        return {
            "trainable": in_place(self.trainable),
            "non-trainable": in_place(self.frozen),
            "optimizer": Section(self.optimizer_state, self.write_optimizer_slot),
            "loss-scale": Section(self.loss_scale_state, self.write_loss_scale),
            "carry": self.carry.section(),
        }
