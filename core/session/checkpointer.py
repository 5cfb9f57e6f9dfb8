"""The checkpoints of a run: when its session saves them, and how it goes back to one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.contracts.events import Resumed
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.errors import EndedError, IsotrainError, RunFailedError
from isotrain.core.launching.run_directory.run_directory import checkpoint_folder
from isotrain.core.session.checkpointing import checkpoint_load, resume_check
from isotrain.core.session.checkpointing.checkpoint_save import CheckpointWriter, SavedTrainerState
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.lr_schedule import LearningRates
from isotrain.core.session.training.step_logger import StepLogger
from isotrain.core.session.training.trainer_state import TrainerState

PathLike = str | os.PathLike[str]


class Checkpointer:
    """Saves where a session is, and takes it back there; every process calls it alike."""

    def __init__(
        self,
        session_context: SessionContext,
        trainer_state: TrainerState,
        step_logger: StepLogger,
        reporter: Reporter,
        rates: LearningRates,
        run_directory: Path,
    ) -> None:
        self._session_context = session_context
        self._rates = rates
        self._trainer_state = trainer_state
        self._step_logger = step_logger
        self._reporter = reporter
        self._saver = CheckpointWriter(self._folder(run_directory), session_context, reporter)

    def _folder(self, run_directory: Path) -> CheckpointFolder | None:
        """Where the run's own lie; a session that nobody launched has no directory for them."""
        policy = self._session_context.spec.checkpoint
        if not self._reporter.has_listener and (policy is None or policy.folder is None):
            return None
        return CheckpointFolder(checkpoint_folder(self._session_context.spec, run_directory))

    def save(self, folder: PathLike | None, notes: Mapping[str, Any]) -> None:
        """Saves one; returns when it is written.

        Args:
            folder: Of checkpoints; None: the run's own.
            notes: The person's own.

        Raises:
            RunFailedError: It cannot be written.
        """
        with self._reporter.doing("save checkpoint"):
            elsewhere = None if folder is None else CheckpointFolder(folder)
            self._saver.save(self._position(notes), elsewhere)
            fault = self._saver.wait()
        if fault is not None:
            step = self._trainer_state.steps_done
            raise RunFailedError(f"the checkpoint of step {step} was not saved: {fault}")

    def save_if_due(self, best: bool, overlap_next_step: bool, notes: Mapping[str, Any]) -> bool:
        """Begins to save one if the spec or a signal asks for it, or the weights are the best so far.

        Where the spec lets training wait for it, it is complete on return, or was warned about.

        Args:
            best: Whether they are.
            overlap_next_step: Whether the copy may be finished beside the next step.
            notes: The person's own.

        Returns:
            Whether one is being saved.

        Raises:
            EndedError: The run was asked to end; its checkpoint is saved.
        """
        policy = self._session_context.spec.checkpoint
        if policy is None:
            return False
        trainer_state = self._trainer_state
        wishes = self._saver.poll_requests(trainer_state.steps_done)
        if best:
            trainer_state.best_steps.append(trainer_state.steps_done)
        due = trainer_state.is_done or self._saver.is_due(
            trainer_state.steps_done, trainer_state.steps_per_epoch
        )
        if not (due or best or wishes.save):
            return False
        with self._reporter.doing("save checkpoint"):
            may_skip = policy.background and not (trainer_state.is_done or wishes.end)
            is_saved = self._saver.save_once(
                self._position(notes), overlap_next_step and policy.background, may_skip
            )
            if not policy.background:
                self._saver.wait()
        if wishes.end and not trainer_state.is_done:
            self._end_as_asked()
        return is_saved

    def _end_as_asked(self) -> None:
        """Ends this process's part of the run when its checkpoint is written."""
        self._saver.wait()
        with self._reporter.doing("barrier"):
            self._session_context.group.barrier()
        step = self._trainer_state.steps_done
        raise EndedError(f"the run was asked to end, and did after step {step}")

    def _position(self, notes: Mapping[str, Any]) -> SavedTrainerState:
        """Where the run is; waits for the losses of its steps."""
        self._step_logger.flush()
        trainer_state = self._trainer_state
        step = trainer_state.steps_done
        return SavedTrainerState(
            step,
            trainer_state.rate_factor,
            *self._step_logger.epoch_so_far,
            list(trainer_state.best_steps),
            trainer_state.loss,
            trainer_state.is_finished,
            dict(notes),
            trainer_state.mark,
            self._rates_around(step),
        )

    def _rates_around(self, step: int) -> list[float]:
        """Of the last step and the next; none where the optimizer sets its rates itself."""
        if self._session_context.group.optimizer_rates() is not None:
            return []
        return [self._rates(s) * self._trainer_state.rate_factor for s in (max(0, step - 1), step)]

    def _changed_rate(self, position: SavedTrainerState) -> list[str]:
        """Says how the rate of the next step is another than in the run that saved a checkpoint."""
        if len(position.rates) != 2 or self._trainer_state.total_steps <= position.step:
            return []
        last, before = position.rates
        now = self._rates(position.step) * position.rate_factor
        if math.isclose(now, before, rel_tol=1e-6):
            return []
        return [
            f"learning rate of step {position.step}: {before:.6g} in the checkpoint, {now:.6g} now; the step"
            f" before it had {last:.6g}"
        ]

    def restore(self, checkpoint: PathLike | None) -> dict[str, Any]:
        """Goes back to a checkpoint; None: to the run's newest.

        Returns:
            The notes that it holds.

        Raises:
            IsotrainError: There is none, it is damaged, or it is of another run: says what differs.
        """
        own = self._session_context
        with self._reporter.doing("restore"):
            self._all_written()
            saved = resume_check.SavedRun(
                checkpoint_at(checkpoint or self._saver.run_folder.location)
            )
            changes = resume_check.changes(saved, own.spec, own.plan)
            changes += self._changed_rate(saved.trainer_state)
            position, where = saved.trainer_state, saved.checkpoint.location
            lost = checkpoint_load.load(
                saved, own, lambda: self._rates(position.step) * position.rate_factor
            )
            lost += own.group.not_checkpointed()
            is_own = self._saver.restored_from(saved.checkpoint, position)
            self._go_on_from(position, is_own=is_own)
            if self._reporter.rank == 0:
                self._reporter.emit(
                    Resumed(done=position.step, location=where, changes=changes, lost=lost)
                )
        return dict(position.notes)

    def _go_on_from(self, position: SavedTrainerState, *, is_own: bool) -> None:
        trainer_state = self._trainer_state
        trainer_state.seek(position.step)
        trainer_state.mark = position.mark
        trainer_state.is_finished = position.is_finished
        trainer_state.restore_count += 1
        trainer_state.last_loss = position.last_loss
        trainer_state.rate_factor = position.rate_factor
        trainer_state.best_steps = list(position.best_steps) if is_own else []
        self._step_logger.resume_from(position.step, position.epoch_loss, position.epoch_samples)

    def restore_best(self) -> None:
        """Takes the weights of the best one, and no other state.

        Raises:
            IsotrainError: None was saved as the best.
        """
        if not self._trainer_state.best_steps:
            raise IsotrainError("restore_best: no checkpoint was saved as the best so far.")
        own = self._session_context
        with self._reporter.doing("restore"):
            self._all_written()
            saved = resume_check.SavedRun(self._saver.last_of(self._trainer_state.best_steps))
            checkpoint_load.load_weights(saved, own)
            own.strategy.state_written(own.group)

    def _all_written(self) -> None:
        """Waits until no process writes or removes one: all see the same then."""
        self._saver.wait()
        self._session_context.group.barrier()

    def wait(self) -> None:
        """Returns once the last one is written by all."""
        self._saver.wait()
