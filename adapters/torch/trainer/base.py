"""One torch replica: its model, loss, optimizer and named state; knows nothing of other replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.metrics.base import Metric
from isotrain.adapters.torch.trainer.carried_state import Carry
from isotrain.adapters.torch.trainer.state import Section, State, in_place
from isotrain.plugin import (
    ExportForm,
    IsotrainError,
    LayerTrait,
    Phase,
    StateKind,
    StatePart,
    Trait,
    unknown_name,
)

LOCAL_BUFFERS = "buffers/"
"""Begins the names under which a replica keeps buffers of its own."""


class LossModule(nn.Module):
    """Wraps a model so that a forward pass gives the loss and the predictions.

    The loss is the mean over the samples, a scalar, where all targets count alike. Else its shape is
    `[2, 1 + losses]`: the sum of the means over the samples, beside it the mean of each loss that counts by
    something else; and in the second row what these count by. Where padding may be left out
    (`ReplicaTrainer.may_ignore_padding`), it may be a vector of two: the mean as if padding counted and had
    a loss of 0, and which part of the targets it is.

    Attributes:
        unregistered: The weights that are no parameters of the model: this module registers them.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[..., tuple[torch.Tensor, Any]],
        weights: Iterable[nn.Parameter] = (),
    ) -> None:
        """Wraps a model.

        Args:
            model: What is trained.
            compute: From inputs and targets to the loss and the predictions.
            weights: That the model has: all of them have to be parameters of this module.
        """
        super().__init__()
        self.model = model
        self._compute = compute
        registered = set(map(id, model.parameters()))
        self.unregistered = nn.ParameterList(w for w in weights if id(w) not in registered)

    def forward(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Returns the loss and the predictions, or None for these."""
        return self._compute(inputs, targets)


class ReplicaTrainer(ABC):
    """What the group needs of one replica, whichever kind its model is.

    Attributes:
        model: The model as the person's function built it.
        loss_module: A module whose forward pass, in training mode, gives loss and predictions. The loss is
            the mean; or, where it does not count all targets alike, rows (see
            `keras_losses.means_and_denominators`).
        trainable: Trainable parameters by canonical name.
        frozen: Every other tensor of the model by canonical name.
        aliases: Other names of those that have several, where weights are tied.
        statistics: Those of `frozen` that forward passes move; replicas must agree on them.
        self_updating: Those of `frozen` that are the model's to move, also in evaluation mode.
        carry: What layers carry from one call to the next, and is no weight.
        updated: The trainable parameters that `apply` updates: all, unless others keep slots of some.
        optimizer_lr_schedule: The schedule that the optimizer came with; None where it has none.
    """

    model: Any
    loss_module: LossModule
    optimizer_lr_schedule: Callable[[int], float] | None = None
    trainable: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    statistics: list[torch.Tensor]
    self_updating: list[torch.Tensor]
    carry: Carry
    updated: list[Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that replicas must have alike at the start, by name."""
        beside = dict(self.loss_module.named_parameters()) | dict(self.loss_module.named_buffers())
        return self.trainable | self.frozen | beside

    def part(self, name: StatePart) -> list[torch.Tensor]:
        """The tensors of a part of the state, as strategies read and write them."""
        if name == "trainable":
            return list(self.trainable.values())
        if name == "statistics":
            return self.statistics
        slots = self.optimizer_state().values()
        return [slot for slot in slots if slot.is_floating_point() and slot.dim()]

    def optimizer_rates(self) -> tuple[float, float] | None:
        """The rates of the last and the next update, where the optimizer sets them itself."""
        return None

    def weight_finalizer(self) -> Callable[[], None] | None:
        """What the optimizer does with the weights when training ends; None where it does nothing."""
        return None

    def without_gradient(self) -> list[LayerTrait]:
        """The trainable weights that the last step gave no gradient; none before the first."""
        given = {name: weight.grad is not None for name, weight in self.trainable.items()}
        if not any(given.values()):
            return []
        kind = type(self.model).__name__
        missing = (name for name, has_gradient in given.items() if not has_gradient)
        return [LayerTrait(Trait.WITHOUT_GRADIENT, name, kind) for name in missing]

    def refuses(self, inputs: Any, targets: Any) -> str | None:
        """The layer that cannot be trained on so few samples; it is tried, without gradients."""
        return None

    def zero_gradients(self) -> None:
        """Forgets the gradients."""
        for parameter in self.trainable.values():
            parameter.grad = None

    @abstractmethod
    def build_metrics(self, phase: Phase) -> list[Metric]:
        """Makes the spec's metrics, which are those of a phase from now on."""

    @abstractmethod
    def traits(self) -> list[LayerTrait]:
        """What the model's layers do that bears on whether runs agree."""

    @abstractmethod
    def evaluate(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Loss (as the objective gives it) and predictions in evaluation mode, without gradients."""

    @abstractmethod
    def has_own_denominator(self, inputs: Any, targets: Any) -> bool:
        """Whether the loss of such slices counts targets by more than their number; nothing moves."""

    @property
    def may_ignore_padding(self) -> bool:
        """Whether the loss may leave out padding, and what the group knows of it: see `LossModule`."""
        return False

    def padding_fraction(self, targets: Any) -> torch.Tensor:
        """Which part of the targets of a slice is padding, a float64 scalar."""
        return torch.zeros((), dtype=torch.float64)

    def set_split(self, is_split: bool) -> None:
        """Says whether the loss of a slice is a part of that of a step; it is, unless this says otherwise."""
        return

    @abstractmethod
    def loss_denominators(self, inputs: Any, targets: Any) -> torch.Tensor:
        """What the losses that do not count all targets alike count by in a slice, without gradients."""

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """What the model gives in evaluation mode, without gradients."""

    @abstractmethod
    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        """Writes the model in a form that others open."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Adds the loss's gradients (scaled, where the precision needs it) to the parameters."""

    @abstractmethod
    def loss_scale(self) -> float:
        """What the gradients in `.grad` are multiplied by; 1 where the precision needs no scaling."""

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Sets the rate of the following updates."""

    @abstractmethod
    def apply(self, norm: torch.Tensor | None = None) -> None:
        """Clips the parameters' gradients and updates the weights.

        Args:
            norm: Of the gradients of all weights, where only some are updated here and the spec clips by it.
        """

    @abstractmethod
    def shard_optimizer(self, places: Sequence[int]) -> None:
        """Updates these of the trainable weights only from now on, and has slots for no others."""

    @abstractmethod
    def is_local_slot(self, slot: str) -> bool:
        """Whether an optimizer slot is of a weight that this replica alone updates."""

    @abstractmethod
    def is_remote_slot(self, slot: str) -> bool:
        """Whether an optimizer slot is of a weight that only another replica updates."""

    def model_notes(self) -> list[str]:
        """What it does with the model in its own way, for the plan."""
        return []

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        """What it does in its own way on such slices; nothing moves."""
        return []

    @abstractmethod
    def seed_replica(self, replica: int) -> None:
        """Gives this replica random numbers (dropout) of its own."""

    @abstractmethod
    def reseed(self, replica: int, step: int) -> None:
        """Draws from here on what a replica draws in a step, whatever was drawn before."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's slots by canonical name, without the prefix `optimizer/`."""

    @abstractmethod
    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        """Sets one slot."""

    @abstractmethod
    def loss_scale_state(self) -> dict[str, torch.Tensor]:
        """The loss scale as `scale`, and the `steps` since it changed; nothing without one."""

    @abstractmethod
    def write_loss_scale(self, name: str, value: torch.Tensor) -> None:
        """Sets one of these."""

    def generators(self) -> dict[str, State]:
        """The states of generators of random numbers that are the model's own, but no weights, by name."""
        return {}

    def local_buffers(self) -> dict[str, torch.Tensor]:
        """Floating-point buffers by name that every replica keeps for itself."""
        return {}

    def execution_state(self) -> dict[str, torch.Tensor]:
        """How it has come to compute: by this, and not by its weights alone, the next step rounds."""
        return {}

    def write_execution_state(self, name: str, value: torch.Tensor) -> None:
        """Takes one of these over.

        Raises:
            IsotrainError: It has none of that name.
        """
        raise IsotrainError(unknown_name("state", f"exchange/{name}", self.execution_state()))

    def capture_now(self) -> None:
        """Computes from the first step on as in all later ones, so that no step hangs on those before it."""
        return

    def eagerly(self) -> AbstractContextManager[None]:
        """Within it, it computes as in a first step, and takes no habit on."""
        return nullcontext()

    def close(self) -> None:
        """Lets the model be changed at will again."""
        return

    def not_checkpointed(self) -> list[str]:
        """What its steps depend on, and its state does not have."""
        return []

    def sections(self) -> dict[StateKind, Section]:
        """The state that it has itself."""
        return {
            "trainable": in_place(self.trainable),
            "non-trainable": in_place(self.frozen),
            "optimizer": Section(self.optimizer_state, self.write_optimizer_slot),
            "loss-scale": Section(self.loss_scale_state, self.write_loss_scale),
            "carry": self.carry.section(),
        }
