"""The checkpoints of a session: saving them when they are due, and restoring one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.checkpoints.tensor_part import Section
from isotrain.core.contracts.events import Resumed, Steps
from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.errors import EndedError, IsotrainError, RunFailedError
from isotrain.core.launching.run_directory.run_directory import checkpoint_folder
from isotrain.core.session.checkpointing import checkpoint_load, resume_check
from isotrain.core.session.checkpointing.checkpoint_save import CheckpointWriter, SavedTrainerState
from isotrain.core.session.checkpointing.handover import CarriedState
from isotrain.core.session.checkpointing.state_snapshot import (
    REPLICATED_STATE,
    as_parts,
    read_section,
)
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.freezing import WeightFreezer
from isotrain.core.session.training.step_logger import StepLogger
from isotrain.core.session.training.trainer_state import TrainerState
from isotrain.core.session.training.weight_average import WeightAverage
from isotrain.core.session.training.weight_update import WeightUpdate
from isotrain.core.session.weights.weights_file import AVERAGE, WEIGHTS

PathLike = str | os.PathLike[str]


class Checkpointer:
    """Saves and restores the state of a session. Collective."""

    def __init__(
        self,
        session_context: SessionContext,
        trainer_state: TrainerState,
        step_logger: StepLogger,
        reporter: Reporter,
        update: WeightUpdate,
        average: WeightAverage,
        freezer: WeightFreezer,
        run_directory: Path,
    ) -> None:
        self._session_context = session_context
        self._update = update
        self._average = average
        self._freezer = freezer
        self._trainer_state = trainer_state
        self._step_logger = step_logger
        self._reporter = reporter
        folder = self._folder(run_directory)
        self._writer = CheckpointWriter(folder, session_context, reporter, average)

    def _folder(self, run_directory: Path) -> CheckpointFolder | None:
        """The run's folder of checkpoints; None for a session without a run directory or a folder."""
        policy = self._session_context.spec.checkpoint
        if not self._reporter.has_listener and (policy is None or policy.folder is None):
            return None
        return CheckpointFolder(checkpoint_folder(self._session_context.spec, run_directory))

    def save(self, folder: PathLike | None, notes: Mapping[str, Any]) -> None:
        """Saves a checkpoint, as `Session.save`, with `session.notes`."""
        with self._reporter.doing("save checkpoint"):
            other_folder = None if folder is None else CheckpointFolder(folder)
            saved = self._saved_state(notes)
            self._trainer_state.saved_step = saved.step
            self._writer.save(saved, other_folder)
            fault = self._writer.wait()
        if fault is not None:
            step = self._trainer_state.steps_done
            raise RunFailedError(f"the checkpoint of step {step} was not saved: {fault}")

    def save_if_due(self, best: bool, overlap_next_step: bool, notes: Mapping[str, Any]) -> bool:
        """Begins to save a checkpoint if one is due, as `Session.save_if_due`.

        With `background: false` in the spec the checkpoint is complete on return, or a warning was sent.
        """
        policy = self._session_context.spec.checkpoint
        if policy is None:
            return False
        trainer_state = self._trainer_state
        requests = self._writer.poll_requests(trainer_state.steps_done)
        if best:
            trainer_state.best_steps.append(trainer_state.steps_done)
        due = trainer_state.is_done or self._writer.is_due(
            trainer_state.steps_done, trainer_state.steps_per_epoch
        )
        if not (due or best or requests.save):
            return False
        is_outdated = trainer_state.saved_step is None
        with self._reporter.doing("save checkpoint"):
            saved = self._saved_state(notes)
            trainer_state.saved_step = saved.step
            may_skip = policy.background and not (trainer_state.is_done or requests.end)
            is_saved = self._writer.save_once(
                saved,
                overlap_next_step and policy.background,
                may_skip,
                is_outdated,
            )
            if not policy.background:
                self._writer.wait()
        if requests.end and not trainer_state.is_done:
            self._end_run()
        return is_saved

    def _end_run(self) -> None:
        """Raises the end of the run once its checkpoint is written."""
        self._writer.wait()
        with self._reporter.doing("barrier"):
            self._session_context.group.barrier()
        step = self._trainer_state.steps_done
        raise EndedError(f"the run was requested to end, and ended after step {step}")

    def _saved_state(self, notes: Mapping[str, Any]) -> SavedTrainerState:
        """The trainer state as a checkpoint holds it; waits for the losses of all steps."""
        self._step_logger.flush()
        self._average.settle(self._session_context.group)
        trainer_state = self._trainer_state
        step = trainer_state.steps_done
        epoch_loss, epoch_samples = self._step_logger.epoch_so_far
        return SavedTrainerState(
            step=step,
            rate_factor=trainer_state.rate_factor,
            epoch_loss=epoch_loss,
            epoch_samples=epoch_samples,
            best_steps=list(trainer_state.best_steps),
            last_loss=trainer_state.loss,
            is_finished=trainer_state.is_finished,
            notes=dict(notes),
            stream_state=trainer_state.stream_state,
            rates=self._rates_around(step),
            fixed_rate=trainer_state.fixed_rate,
            plateau_fractions=dict(trainer_state.plateau_fractions),
            skipped_steps=trainer_state.skipped_steps,
            skipped_in_a_row=dict(trainer_state.skipped_in_a_row),
            averaged=self._average.count,
            values={name: float(value) for name, value in (trainer_state.values or {}).items()},
            frozen=list(trainer_state.frozen),
        )

    def _rates_around(self, step: int) -> list[float]:
        """Learning rates of the last and the next step; empty if the optimizer sets its rates itself."""
        if self._session_context.group.optimizer_rates() is not None:
            return []
        return [self._update.rate(each) for each in (max(0, step - 1), step)]

    def _changed_rate(self, saved: SavedTrainerState) -> list[str]:
        """Describes how the learning rate of the next step differs from that in the saved run."""
        if len(saved.rates) != 2 or self._trainer_state.total_steps <= saved.step:
            return []
        last, before = saved.rates
        now = self._next_rates(saved)[None]
        if math.isclose(now, before, rel_tol=1e-6):
            return []
        return [
            f"learning rate of step {saved.step}: {before:.6g} in the checkpoint, {now:.6g} now; the step"
            f" before it had {last:.6g}"
        ]

    def _next_rates(self, saved: SavedTrainerState) -> dict[int | None, float]:
        """Rates of the next step by this run's spec and what the saved run's session changed.

        By index of the optimizer groups with a schedule of their own; under None, that of the step.
        """
        scheduled = self._update.scheduled_rates
        fraction = saved.plateau_fractions.get(self._update.name, 1.0)
        rates: dict[int | None, float] = dict(scheduled.of_groups(saved.step).items())
        rates[None] = scheduled(saved.step) * fraction
        if saved.fixed_rate is not None:
            rates = dict.fromkeys(rates, saved.fixed_rate)
        return {group: rate * saved.rate_factor for group, rate in rates.items()}

    def restore(self, checkpoint: PathLike | None) -> dict[str, Any]:
        """Restores a checkpoint, as `Session.restore`; returns the notes in it."""
        context = self._session_context
        with self._reporter.doing("restore"):
            self._wait_for_all_writers()
            saved = resume_check.SavedRun(
                checkpoint_at(checkpoint or self._writer.run_folder.location)
            )
            changes = resume_check.changes(saved, context.spec, context.plan)
            changes += self._changed_rate(saved.trainer_state)
            state, location = saved.trainer_state, saved.checkpoint.location
            lost = [*self._load(saved), *context.group.not_checkpointed()]
            self._trainer_state.is_savepoint = self._is_savepoint(saved)
            is_from_this_run = self._writer.note_restored(saved.checkpoint, state)
            self._continue_from(state, is_from_this_run=is_from_this_run)
            self._trainer_state.stream_state = checkpoint_load.load_stream_state(saved)
            if self._reporter.rank == 0:
                self._reporter.emit(
                    Resumed(done=state.step, location=location, changes=changes, lost=lost)
                )
        return dict(state.notes)

    def _is_savepoint(self, saved: resume_check.SavedRun) -> bool:
        """Whether all replicas have the same state, now that they have that of a checkpoint."""
        if not checkpoint_load.keeps_different_weights(saved, self._session_context):
            return True
        last_step = saved.trainer_state.step - 1
        # None, for strategies without savepoints: others can go on after each step
        return self._session_context.strategy.is_savepoint(last_step) is not False

    def _load(self, saved: resume_check.SavedRun) -> list[str]:
        """Loads all state of a checkpoint; describes what could not be loaded."""
        state = saved.trainer_state
        self._freezer.set_frozen(self._present(state.frozen))
        lost = self._restore_average(saved)
        return lost + checkpoint_load.load(
            saved, self._session_context, lambda: self._next_rates(state)
        )

    def carried_state(
        self,
        notes: Mapping[str, Any],
        phase: int,
        metrics_collected: bool,
        undo: Callable[[], None] | None = None,
    ) -> CarriedState:
        """Copies the state with which this process can go on in another process group. Local.

        Args:
            notes: Notes of the session.
            phase: Number of parts of the built-in loop that are done after the last step.
            metrics_collected: Whether the metrics of the epoch, which ends with it, are reduced already.
            undo: Function that restores what the forward pass of a broken step has changed; None: none was.
        """
        context = self._session_context
        group = context.group
        metrics_of_next = self.metrics()
        if undo is not None:
            undo()
        saved = self._saved_state(notes)
        strategy_state = context.strategy.state(group)
        sections = {"state": read_section(group, REPLICATED_STATE)}
        if strategy_state.tensors:
            sections["strategy"] = as_parts(strategy_state.tensors)
        if self._average.count:
            with self._average.applied(group):
                sections[AVERAGE] = read_section(group, WEIGHTS)
        return CarriedState(
            replica=group.local_replicas[0],
            done=saved.step,
            phase=phase,
            metrics_collected=metrics_collected,
            replicas_differ=context.strategy.is_savepoint(0) is not None,
            run=self._writer.run_record(saved, False, strategy_state),
            sections=sections,
            metrics=self.metrics(),
            metrics_of_next=metrics_of_next,
        )

    def metrics(self) -> Section:
        """Copies the training metrics of this process's first replica. Local."""
        return read_section(self._session_context.group, ("metrics",))

    def give_up(self) -> None:
        """Gives up a checkpoint that other processes would write with this one. Local."""
        self._writer.give_up()

    def take_over(self, location: str, membership: Membership) -> dict[str, Any]:
        """Takes the state that members of the last process group handed over; returns its notes.

        Rank 0 reports what an earlier rank 0 has not reported.
        """
        saved = resume_check.SavedRun(checkpoint_at(location))
        lost, state, reporter = self._load(saved), saved.trainer_state, self._reporter
        self._continue_from(state, is_from_this_run=True)
        reporter.drop_kept(state.step)
        if reporter.rank == 0:
            received = membership.reported, membership.epochs, membership.scalars
            reported = reporter.send_kept(*received)
            if reported < state.step and state.last_loss is not None:  # that of the source alone
                rates = state.rates[:1] or [math.nan]
                losses = [state.last_loss]
                reporter.emit(Steps(first=state.step - 1, losses=losses, learning_rates=rates))
            if lost:
                reporter.warn(f"elastic: not taken over: {'; '.join(lost)}")
        return dict(state.notes)

    def _present(self, names: Sequence[str]) -> list[str]:
        """Names that weights of this run have, out of these."""
        present = self._session_context.group.describe_state(("trainable", "non-trainable"))
        return [name for name in names if name in present]

    def _restore_average(self, saved: resume_check.SavedRun) -> list[str]:
        """Loads the average of the weights, before the weights themselves; says whether it is lost."""
        count = saved.trainer_state.averaged
        if count:
            checkpoint_load.load_average(saved, self._session_context)
        is_continued = self._average.restore(self._session_context.group, count)
        return ["the average of the weights"] if count and not is_continued else []

    def _continue_from(self, saved: SavedTrainerState, *, is_from_this_run: bool) -> None:
        trainer_state = self._trainer_state
        trainer_state.seek(saved.step)
        trainer_state.saved_step = saved.step
        trainer_state.is_finished = saved.is_finished
        trainer_state.restore_count += 1
        trainer_state.last_loss = saved.last_loss
        trainer_state.rate_factor = saved.rate_factor
        trainer_state.fixed_rate = saved.fixed_rate
        trainer_state.plateau_fractions = dict(saved.plateau_fractions)
        trainer_state.skipped_steps = saved.skipped_steps
        trainer_state.skipped_in_a_row = dict(saved.skipped_in_a_row)
        trainer_state.values = saved.values
        trainer_state.best_steps = list(saved.best_steps) if is_from_this_run else []
        self._step_logger.resume_from(
            saved.step, saved.last_loss, saved.epoch_loss, saved.epoch_samples
        )

    def restore_best(self) -> None:
        """Loads the weights of the best checkpoint, as `Session.restore_best`."""
        if not self._trainer_state.best_steps:
            raise IsotrainError("restore_best: no checkpoint was saved as the best so far.")
        context = self._session_context
        with self._reporter.doing("restore"):
            self._wait_for_all_writers()
            saved = resume_check.SavedRun(self._writer.last_of(self._trainer_state.best_steps))
            self._restore_average(saved)
            checkpoint_load.load_weights(saved, context)
            context.strategy.state_written(context.group)

    def _wait_for_all_writers(self) -> None:
        """Waits until no process writes or removes a checkpoint, so that all see the same ones."""
        self._writer.wait()
        self._session_context.group.barrier()

    def wait(self) -> None:
        """Waits until all processes have written the last checkpoint."""
        self._writer.wait()
