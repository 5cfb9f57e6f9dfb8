"""How far a run has come, and what its steps have made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from isotrain.core.contracts.replica import Tensor
from isotrain.core.data.stream_state import StreamState
from isotrain.core.errors import IsotrainError


@dataclass
class TrainerState:
    """Where one process is in a run: what its session changes from step to step, the same on every process.

    Attributes:
        steps_per_epoch: Of the run.
        total_steps: Of all epochs.
        steps_done: So far.
        is_stopped: Whether somebody wants no more of them.
        is_finished: Whether the strategy has done all that it had to do.
        rate_factor: By which the spec's learning rates are multiplied.
        last_loss: Of the last step, which need not be known yet; None before the first.
        best_steps: Of the checkpoints that were each the best so far; the last is the best.
        mark: To which place the stream of data can be taken back, if it has a state of its own.
        restore_count: How often a checkpoint has taken it elsewhere.
        is_predicting: Whether an iterator of predictions is open, whose end puts back the state before it.
    """

    steps_per_epoch: int
    total_steps: int
    steps_done: int = 0
    is_stopped: bool = False
    is_finished: bool = False
    rate_factor: float = 1.0
    last_loss: Tensor | None = None
    best_steps: list[int] = field(default_factory=list)
    mark: StreamState | None = None
    restore_count: int = 0
    is_predicting: bool = False

    @property
    def is_done(self) -> bool:
        """Whether no step is left, or wanted."""
        return self.is_stopped or self.steps_done >= self.total_steps

    @property
    def loss(self) -> float | None:
        """Of the last step, for which this waits; None before the first."""
        return None if self.last_loss is None else float(self.last_loss)

    def require_no_predictions(self, call: str) -> None:
        """Refuses a call that changes or saves the state while predictions are being read.

        Raises:
            IsotrainError: An iterator of predictions is open.
        """
        if self.is_predicting:
            raise IsotrainError(
                f"{call}: session.predictions is being read, and puts back at its end the state that it began"
                " with. Read it to its end, or close it, before."
            )

    def seek(self, step: int) -> None:
        """Makes `step` the next; what else there is stays."""
        self.steps_done = step
        self.mark = None
        self.is_finished = False
