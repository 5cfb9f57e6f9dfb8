"""The state of the training loop: step counters, learning-rate factor, last loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.errors import IsotrainError


@dataclass
class TrainerState:
    """Mutable state of the training loop; identical on all ranks but for `stream_state`.

    Attributes:
        steps_per_epoch: Number of steps per epoch.
        total_steps: Number of steps over all epochs.
        steps_done: Number of steps taken so far.
        is_stopped: Whether training was ended early.
        is_finished: Whether the strategy has finished its work after the last step.
        rate_factor: Factor on the learning rates of the spec, or on `fixed_rate`.
        values: Values of the last step by name; None before the first.
        last_loss: Scalar loss of the last step, possibly not computed yet; None before the first.
        last_gradient_norm: Scalar norm of the last step's gradients; None if it is not measured.
        best_steps: Steps of the checkpoints that were the best when saved, ascending; the last is the best.
        stream_state: State of the data stream after the last step, if the stream can be resumed from a state.
        restore_count: Number of restores so far.
        is_savepoint: Whether all replicas have the same state, from which others can go on if one is lost;
            false between the savepoints of a strategy (`Strategy.is_savepoint`).
        skipped_steps: Number of steps, or updates of steps, left out since their loss or gradients are not
            finite: `on_nan: skip`.
        skipped_in_a_row: Number of these since the last one that was not left out, by the name of the update
            (empty without updates).
        saved_step: Number of steps in the newest checkpoint; None before the first, or where its last step
            has had an update since.
        fixed_rate: Learning rate from `set_learning_rate`, in place of the spec's; None for the spec's.
        plateau_fractions: Fractions of the spec's rates to which the schedule `plateau` has lowered them, by
            the name of the update (empty without updates).
        frozen: Sorted names of the weights that `session.freeze` has frozen.
        is_predicting: Whether an iterator of predictions is open; closing it restores the state before it.
        is_averaged: Whether the replicas hold the average of the weights, as in `session.averaged()`.
    """

    steps_per_epoch: int
    total_steps: int
    steps_done: int = 0
    is_stopped: bool = False
    is_finished: bool = False
    rate_factor: float = 1.0
    values: Mapping[str, float] | None = None
    last_loss: Tensor | None = None
    last_gradient_norm: Tensor | None = None
    best_steps: list[int] = field(default_factory=list)
    stream_state: StreamState | None = None
    restore_count: int = 0
    is_savepoint: bool = True
    saved_step: int | None = None
    fixed_rate: float | None = None
    plateau_fractions: dict[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    is_predicting: bool = False
    is_averaged: bool = False

    @property
    def is_done(self) -> bool:
        """Whether no step is left, or training was ended early."""
        return self.is_stopped or self.steps_done >= self.total_steps

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None before the first. Waits for the device."""
        return None if self.last_loss is None else float(self.last_loss)

    def rate(self, scheduled: float, update: str | None) -> float:
        """Learning rate of a step for which a schedule has the rate `scheduled`.

        Args:
            scheduled: Rate by the schedule.
            update: Name of the update whose schedule it is; None: that of an optimizer group.
        """
        if self.fixed_rate is not None:
            return self.fixed_rate * self.rate_factor
        fraction = 1.0 if update is None else self.plateau_fractions.get(update, 1.0)
        return scheduled * fraction * self.rate_factor

    def require_training_weights(self, call: str) -> None:
        """Refuses a call that changes or saves the state while the replicas hold another one.

        Raises:
            IsotrainError: An iterator of predictions is open, or `session.averaged()` is.
        """
        if self.is_predicting:
            raise IsotrainError(
                f"{call}: an iterator of session.predictions is open, and restores the state that it began"
                " with when it ends. Read it to its end, or close it, first."
            )
        if self.is_averaged:
            raise IsotrainError(
                f"{call}: within session.averaged() the weights are those of the average, and the training"
                " weights come back at its end. Leave it first."
            )

    def seek(self, step: int) -> None:
        """Makes `step` the next step to take; keeps weights, loss and learning-rate factor."""
        self.steps_done = step
        self.stream_state = None
        self.is_finished = False
