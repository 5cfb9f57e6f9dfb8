"""Hooks of a replica group: methods whose neutral defaults are right for most backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from isotrain.core.data.batch import Batch
from isotrain.core.errors import UnsupportedError


class Trait(StrEnum):
    """A behavior of a layer because of which runs may differ between backends or numbers of replicas."""

    LOCAL_STATISTICS = "local-statistics"
    """Batch normalization over the samples of the call, such as a micro-batch."""
    GLOBAL_STATISTICS = "global-statistics"
    """Batch normalization over the global batch (synchronized batch normalization)."""
    RANDOM = "random"
    """Random numbers from the framework's generator."""
    LOWER_PRECISION = "lower-precision"
    """Computation in fewer bits than the spec's precision."""
    CUSTOM_TRAINING = "custom-training"
    """A custom train step, loss or optimizer, which isotrain does not call."""
    WITHOUT_GRADIENT = "without-gradient"
    """A trainable weight without a gradient in the last step."""
    HIDDEN = "hidden"
    """An opaque layer, which may have any of these traits."""


@dataclass(frozen=True)
class PassCosts:
    """Costs of the forward and backward pass of a slice.

    Attributes:
        peak_bytes: Largest number of bytes at a time of what the passes make, without gradients of weights.
        flops: Floating-point operations of matrix products, convolutions and attention.
        moved_bytes: Bytes that all operations read and write, if each reads its inputs from memory.
    """

    peak_bytes: float
    flops: float
    moved_bytes: float

    def __mul__(self, factor: float) -> PassCosts:
        return PassCosts(
            *(factor * each for each in (self.peak_bytes, self.flops, self.moved_bytes))
        )


@dataclass(frozen=True)
class LayerTrait:
    """A trait of one layer.

    Attributes:
        trait: The behavior.
        layer: Layer name in the model; the method that is not called for `CUSTOM_TRAINING`, the weight's
            name for `WITHOUT_GRADIENT`.
        kind: Class name of the layer.
    """

    trait: Trait
    layer: str
    kind: str


class GroupHooks:
    """Hooks of a replica group, which overrides those that its framework or model needs. All are local."""

    @property
    def model(self) -> Any:
        """The model of this process's replicas, for `session.model`. Local.

        Raises:
            UnsupportedError: The group has no model to give.
        """
        raise UnsupportedError(
            f"session.model: groups {type(self).__name__} do not give their model."
        )

    @property
    def takes_text(self) -> bool:
        """Whether `to_device` takes arrays of text, which layers of a model look up. Local."""
        return False

    def is_on_device(self, value: Any) -> bool:
        """Whether a value is already as `to_device` would return it, so that it needs no copy. Local."""
        return False

    def pass_costs(self, batch: Batch) -> PassCosts | None:
        """Costs of the forward and backward pass of the first slice, for the plan; None: unknown. Local.

        Neither weights, with their gradients and optimizer state, nor the slice count as memory.
        """
        return None

    def is_remote(self, name: str) -> bool:
        """Whether only other processes hold the named state, which is then not loaded here. Local."""
        return False

    def snapshot_scalar(self, value: Any) -> Any:
        """Copy of a scalar tensor without autograd history, for a log that reads it later. Local.

        The default reads it at once; frameworks that compute asynchronously copy it on the device.

        Args:
            value: Tensor with one element, or a loss that is not computed yet, which has `is_ready`.
        """
        return value if hasattr(value, "is_ready") else float(value)

    def reshard_weights(self) -> None:
        """Frees weights of other stages or shards in pipeline and fully sharded runs. Local.

        Does nothing in other runs. Called on every process before a checkpoint is read whose state is equal
        on all replicas; `gather_stages` and `unshard_weights` get the other weights back. Averages over
        replicas and converted state are written unsharded.
        """

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        """Learning rate schedule of a custom optimizer; None where it has none. Local.

        Returns:
            Function from the number of steps done to the next step's learning rate, equal on all processes.
        """
        return None

    def optimizer_rates(self) -> tuple[float, float] | None:
        """Learning rates of an optimizer that ignores the given ones and sets its own. Local.

        Returns:
            Rates of the last and of the next update; None for optimizers that use the step's learning rate.
        """
        return None

    def momentum_setter(self) -> Callable[[float], None] | None:
        """Function that sets the optimizer's momentum, or `beta_1`, for later updates. Local.

        Returns:
            Function of the momentum, from 0 to below 1; None if the optimizer's cannot change within a run.
        """
        return None

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        """Sets the learning rates of later updates for optimizer groups with a schedule of their own. Local.

        Args:
            rates: Rates before `lr_factor`, by index in `optimizer.groups`.

        Raises:
            UnsupportedError: The groups of this backend or layout have no rates of their own.
        """
        raise UnsupportedError(
            "optimizer.groups: schedule: here all groups follow the schedule of the step. Give an lr_factor."
        )

    def weight_finalizer(self) -> Callable[[], None] | None:
        """Function by which a custom optimizer changes the weights when training ends. Local.

        Returns:
            Function that, for example, overwrites the weights of each local replica with their moving
            averages; None for optimizers that change nothing.
        """
        return None

    def traits(self) -> list[LayerTrait]:
        """Traits of the model's layers because of which runs may differ. Local."""
        return [LayerTrait(Trait.HIDDEN, "model", type(self).__name__)]

    def plan_notes(self) -> list[str]:
        """Notes for the plan on unexpected uses of the model or the loss. Local."""
        return []

    def step_notes(self, batch: Batch) -> list[str]:
        """Notes on how steps on such batches differ from what the spec says. Local; changes no state."""
        return []

    def refuses_single_sample(self, batch: Batch) -> str | None:
        """Name of a layer that cannot train on a slice of one sample, such as batch normalization. Local.

        It may try the first slice of `batch`; it changes no state.
        """
        return None

    def needs_closure(self) -> bool:
        """Whether the optimizer computes the loss itself, several times in a step, as L-BFGS does. Local."""
        return False

    def objective_communicates(self) -> bool:
        """Whether the objective has called a collective of its step, and so is no mean over parts. Local."""
        return False

    def not_checkpointed(self) -> list[str]:
        """State that affects training but that `read_state` cannot return: one sentence each. Local."""
        return []
