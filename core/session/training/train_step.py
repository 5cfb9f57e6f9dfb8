"""The training loop of a session: batches, learning rates, steps and their checks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.events import Warned
from isotrain.core.contracts.reporter import BETWEEN_CALLS, CheckpointRequest, Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.data.map_style import BatchIndexed, MapStyle
from isotrain.core.data.refusals import LOSS, RefusedError
from isotrain.core.errors import (
    DataError,
    IsotrainError,
    PeerLostError,
    SpecError,
    UnsupportedError,
    unknown_name,
)
from isotrain.core.planning.single_sample_slices import (
    batches_with_single_sample,
    single_sample_refusal,
)
from isotrain.core.quantities import counted
from isotrain.core.session.training.consensus import Consensus, require_same_samples
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.custom_batch import BatchBuilder
from isotrain.core.session.training.loss_check import LossCheck
from isotrain.core.session.training.step_logger import StepLogger
from isotrain.core.session.training.step_profiler import StepProfiler
from isotrain.core.session.training.timers import Stopwatch
from isotrain.core.session.training.trainer_state import TrainerState
from isotrain.core.session.training.weight_average import WeightAverage
from isotrain.core.session.training.weight_update import WeightUpdate
from isotrain.core.spec.step_values import values_at
from isotrain.core.spec.training_spec import TrainingSpec


def needs_targets(spec: TrainingSpec, framework: str) -> bool:
    """Whether a loss for the framework is a built-in one, which needs targets; custom losses may not."""
    losses = (
        loss for each in spec.update_specs.values() for loss in each.losses(framework).values()
    )
    return any(not loss.is_reference for loss in losses)


def missing_targets_error(source: Any, inputs: Any) -> DataError:
    """The error for samples of a source that have inputs only: an array or a structure of arrays."""
    problem = "data: the samples have no targets, with which the loss compares the predictions."
    if not isinstance(inputs, Mapping) or not isinstance(source, BatchIndexed | MapStyle):
        return DataError(f"{problem} Give pairs (inputs, targets).")
    names = ", ".join(map(repr, inputs))
    return DataError(
        f"{problem} Each is a dict of {names}: say which of them are the targets, as in"
        f" isotrain.sources.{type(source).__name__}(data, inputs=..., targets=...)."
    )


class TrainLoop:
    """The training loop of a run. Collective: every process calls each method at the same point.

    Attributes:
        trainer_state: Step counters, learning-rate factor and last loss.
        updates: Updates of a step by name, in their order: one, with an empty name, without named updates.
        loss_check: Compares the loss of a batch with the mean over its parts.
        undo: In an elastic run, function that restores what the forward pass of the present step has changed;
            None between steps, in runs with savepoints, and in other runs.
        keep_savepoint: Function that keeps a copy of the state, called before each step after a savepoint.
        step_logger: Reports the steps of rank 0 to the launcher.
        average: Average of the weights, by `ema` or `swa` of the spec.
    """

    def __init__(
        self,
        session_context: SessionContext,
        reporter: Reporter,
        stopwatch: Stopwatch,
        run_directory: Path,
        *,
        may_stop: bool,
    ) -> None:
        self._strategy = session_context.strategy
        self._reporter = reporter
        self._stop_consensus = Consensus(session_context.group) if may_stop else None
        self._stopwatch = stopwatch
        self._loader = loader = session_context.loaders.training()
        self._loaders = session_context.loaders
        self._shares = session_context.shares
        self._train = session_context.loaders.data.train
        self._needs_targets = needs_targets(session_context.spec, session_context.plan.framework)
        specs = session_context.spec.update_specs.values()
        self._has_loss = any(each.objective is None for each in specs)
        self._plan = session_context.plan
        self._peeked: tuple[tuple[int, int], Batch | None] | None = None
        self._step_of_data: int | None = None
        """Step of the batch that `batches` has yielded and waits for; None while nobody iterates."""
        self.undo: Callable[[], None] | None = None
        self.keep_savepoint: Callable[[], None] = lambda: None
        self._is_elastic = session_context.spec.elastic is not None
        self._has_savepoints = self._is_elastic and self._strategy.is_savepoint(0) is not None
        self._is_first_custom_batch = True
        self._has_warned_of_partial_save = False
        self._single_sample_batches = batches_with_single_sample(
            session_context.spec, self._plan, self._plan.samples
        )
        self.trainer_state = TrainerState(loader.steps_per_epoch, loader.total_steps)
        self.average = WeightAverage(session_context.spec.weight_average, self.trainer_state)
        self._custom_batches = BatchBuilder(session_context, self.trainer_state)
        self._group = group = session_context.group
        self._named_updates = session_context.spec.updates or {}
        self.updates = {
            name: WeightUpdate(name, each, session_context, self.trainer_state, reporter)
            for name, each in session_context.spec.update_specs.items()
        }
        self._values = session_context.spec.values
        self._finalize_weights = group.weight_finalizer()
        if self._named_updates and any(each.weight_finalizer() for each in group.updates.values()):
            raise SpecError(
                "optimizer.custom: use_ema: weights that several updates train have no average of their own."
                " Leave it out."
            )
        if self._finalize_weights and self._strategy.keeps_replicas_equal != "always":
            raise SpecError(
                f"optimizer.custom: use_ema: under strategy {self._strategy.name} each replica trains weights"
                " of its own, and an average of these is not that of the run. Leave it out, or use strategy"
                " data-parallel."
            )
        self._profiler = StepProfiler(
            session_context, reporter.rank, run_directory, loader.total_steps
        )
        self.loss_check = LossCheck(session_context, reporter)
        self.step_logger = StepLogger.of(session_context, reporter, stopwatch, loader.total_steps)

    def learning_rate(self, step: int, update: str | None, group: int | None) -> float:
        """Learning rate of a step, by the spec or by the optimizer, as `Session.learning_rate`. Local."""
        return self._requested_update(update, "learning_rate").known_rate(step, group)

    def batches(self) -> Iterator[Batch]:
        """Yields batches from the next step to the end of the run; a restore moves the next step.

        Shares that are dealt anew do not: a loop that reads ahead has batches of later steps already.
        """
        self._peeked = None  # frees its memory
        reading: tuple[int, tuple[int, ...] | None] | None = None
        step = 0
        try:
            while reading != self._reading:
                if reading is None or reading[0] != self._reading[0]:
                    step = self.trainer_state.steps_done
                reading = self._reading
                for batch in self._checked(self._batches_until_changed(step)):
                    self._step_of_data = batch.step
                    step = batch.step + 1
                    yield batch
        finally:
            self._step_of_data = None

    def custom_batch(self, inputs: Any, targets: Any, sample_weights: Any) -> Batch:
        """A global batch of arrays of all processes, as `Session.batch`.

        Raises:
            IsotrainError: No step is left, or that of the last batch of the data is taken already.
            DataError: The arrays do not fit the loss or the model.
        """
        trainer_state = self.trainer_state
        if trainer_state.is_done:
            raise IsotrainError(
                f"session.batch: the run has {counted(trainer_state.total_steps, 'step')}, of which none is"
                " left after"
                f" {trainer_state.steps_done}. `while not session.is_done` ends a loop, and `steps` of the"
                " spec says how many there are."
            )
        if self._step_of_data not in (None, trainer_state.steps_done):
            raise IsotrainError(
                f"session.batch: step {self._step_of_data} was taken with its batch of the data, and the next"
                " one belongs to the next batch. Put all samples of a step into one batch; or give the spec"
                " no `data` and make every batch of arrays."
            )
        with self._reporter.doing("batch"):
            batch = self._custom_batches.build(inputs, targets, sample_weights)
            self._loaders.has_custom_batches = True
            if self._needs_targets and batch.slices[0][0].targets is None:
                raise DataError(
                    "session.batch: the loss compares predictions with targets, and there are none. Give"
                    " session.batch(inputs, targets)."
                )
            if self._is_first_custom_batch:
                self._is_first_custom_batch = False
                self._check_first(batch)
        return batch

    def next_batch(self) -> Batch | None:
        """The next batch, to look at; None after the last. Cached: a stream could yield a different one."""
        if self._train is None:
            return None
        position = self.trainer_state.steps_done, self.trainer_state.restore_count
        if self._peeked is None or self._peeked[0] != position:
            self._peeked = position, next(self._batches_until_changed(position[0]), None)
        return self._peeked[1]

    @property
    def _reading(self) -> tuple[int, tuple[int, ...] | None]:
        """Number of restores, and shares of the replicas: when these change, batches are read anew."""
        counts = None if self._shares is None else self._shares.counts
        return self.trainer_state.restore_count, counts

    def _batches_until_changed(self, step: int) -> Iterator[Batch]:
        """The batches from a step on, until a restore, or until shares are dealt anew.

        Args:
            step: The next step; a later one only of data by position, as streams go on from their state.
        """
        trainer_state, reading = self.trainer_state, self._reading
        self._reporter.enter("next batch")
        for batch in self._loader.from_step(step, trainer_state.stream_state, reading[1]):
            if trainer_state.is_stopped or reading != self._reading:
                break
            require_same_samples(self._group, batch)
            if self._needs_targets and batch.slices[0][0].targets is None:
                raise missing_targets_error(self._train, batch.slices[0][0].inputs)
            self._reporter.enter(BETWEEN_CALLS)
            yield self._with_values(batch)
            self._reporter.enter("next batch")
        self._reporter.enter(BETWEEN_CALLS)

    def _with_values(self, batch: Batch) -> Batch:
        """A batch with the spec's values of its step, unless it has others."""
        if self._values.keys() <= batch.values.keys():
            return batch
        return replace(batch, values={**values_at(self._values, batch.step), **batch.values})

    def evaluation_values(self) -> Mapping[str, float]:
        """Values that objectives get in an evaluation: those of the last step, or of the first to come."""
        scheduled = values_at(self._values, self.trainer_state.steps_done)
        return {**scheduled, **(self.trainer_state.values or {})}

    def _checked(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the batches; checks loss and model on the first one before it is yielded.

        Raises:
            RefusedError: The loss is not a mean over samples.
            DataError: The model refuses slices of one sample, and the run has such.
        """
        for batch in itertools.islice(batches, 1):
            self._check_first(batch)
            yield batch
        yield from batches

    def _check_first(self, batch: Batch) -> None:
        if self.loss_check.is_due:
            self.loss_check.require_mean(batch)
        single = self._single_sample_batches
        if single and (layer := self._group.refuses_single_sample(batch)):
            raise DataError(f"data: {single_sample_refusal(layer, self._plan, single)}")

    def _requested_update(self, name: str | None, call: str) -> WeightUpdate:
        """The update that a call is about: the only one without named updates.

        Raises:
            IsotrainError: The spec has updates and none is named, or none of that name.
        """
        if name is None and self._named_updates:
            raise IsotrainError(
                f"{call}: expected the name of an update ({', '.join(self.updates)}), received none."
            )
        if name is not None and name not in self._named_updates:
            raise IsotrainError(unknown_name("update", name, self._named_updates))
        return self.updates[name or ""]

    def _due_updates(self, batch: Batch, name: str | None) -> list[WeightUpdate]:
        """The updates to do with a batch: the requested one, or those that are due.

        Raises:
            IsotrainError: None is due, or the spec has no update of that name.
        """
        if name is not None or not self._named_updates:
            return [self._requested_update(name, "step")]
        due = [n for n, each in self._named_updates.items() if each.is_due(batch.step, batch.epoch)]
        if not due:
            raise IsotrainError(
                f"updates: none is due in step {batch.step} of epoch {batch.epoch}, by their `every` and"
                " `from_epoch`. Let one be due in every step."
            )
        return [self.updates[each] for each in due]

    def step(self, batch: Batch, update: str | None = None) -> Tensor:
        """Takes one training step; returns the mean loss of the global batch, a scalar tensor."""
        batch = self._with_values(batch)
        try:
            return self._take_step(batch, lambda each, rate: each.step(batch, rate), update)
        except Exception as error:
            self._tell_of_whole_samples(error, batch)
            raise

    def _tell_of_whole_samples(self, error: Exception, batch: Batch) -> None:
        """Adds to an error of the first step that the loss gets no targets, if nothing names them."""
        inputs, targets = batch.slices[0][0].inputs, batch.slices[0][0].targets
        is_whole = isinstance(inputs, Mapping) and isinstance(self._train, BatchIndexed | MapStyle)
        is_first = not self.trainer_state.steps_done and not isinstance(error, PeerLostError)
        if is_first and self._has_loss and targets is None and is_whole:
            error.add_note(
                f"The model gets each sample as a whole, a dict of {', '.join(map(repr, inputs))}. If the"
                f" loss needs targets: isotrain.sources.{type(self._train).__name__}(data, inputs=...,"
                " targets=...) says which are inputs and which are targets."
            )

    def gradients(
        self, batch: Batch, update: str | None = None
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Mean gradients over the global batch, and its loss, as `Session.gradients`."""
        self.trainer_state.require_training_weights("gradients")
        requested = self._requested_update(update, "gradients")
        self._reporter.step = batch.step
        with self._reporter.doing("gradients"):
            return requested.gradients(self._with_values(batch))

    def apply_gradients(
        self,
        batch: Batch,
        gradients: Sequence[Sequence[Tensor]],
        loss: Tensor,
        update: str | None = None,
    ) -> None:
        """Takes a step with mean gradients and a loss to record, as `Session.apply_gradients`."""
        requested = self._requested_update(update, "apply_gradients")
        batch = self._with_values(batch)

        def take(each: WeightUpdate, rate: float) -> Tensor:
            each.apply_gradients(batch, gradients, loss, rate)
            return loss

        self._take_step(batch, take, requested.name or None)

    def _take_step(
        self, batch: Batch, take: Callable[[WeightUpdate, float], Tensor], update: str | None
    ) -> Tensor:
        """Takes a step: one update, or all that are due; returns the mean loss, a scalar tensor.

        Args:
            batch: Batch of the step, with its values.
            take: Does an update at a learning rate; returns its mean loss.
            update: Name of the requested update; None: those that are due.
        """
        group, reporter, trainer_state = self._group, self._reporter, self.trainer_state
        trainer_state.require_training_weights("step")
        if self._is_elastic and reporter.is_regroup_requested and trainer_state.is_savepoint:
            raise PeerLostError("the process group is formed anew, because a process joins the run")
        updates = self._due_updates(batch, update)
        continues = update is not None and trainer_state.steps_done == batch.step + 1
        if continues and trainer_state.saved_step == trainer_state.steps_done:
            self._note_saved_between_updates(batch.step, updates[0].name)
        reporter.step = batch.step
        reporter.enter("step")
        trainer_state.is_finished = False
        self.average.before_step(group, batch.step)
        self._profiler.before_step(batch.step)
        trainer_state.values = batch.values
        if self._has_savepoints:
            if trainer_state.is_savepoint:
                self.keep_savepoint()
            trainer_state.is_savepoint = False
        elif self._is_elastic:
            self.undo = group.savepoint()
        rates = []
        for each in updates:
            each.prepare(batch.step)
            rates.append(each.rate(batch.step))
        losses, applied = [], []
        for each, rate in zip(updates, rates, strict=True):
            skipped = trainer_state.skipped_steps
            losses.append(take(each, rate))
            applied += [each] * (trainer_state.skipped_steps == skipped)
        loss = functools.reduce(operator.add, losses)
        before = trainer_state.last_loss if continues else None
        trainer_state.last_loss = loss if before is None else before + loss
        trainer_state.steps_done, trainer_state.stream_state = batch.step + 1, batch.stream_state
        self.undo = None
        if applied:
            self.average.after_step(trainer_state.steps_done)
        if not continues and self._is_stop_requested():
            trainer_state.is_stopped = True
        self._profiler.after_step(batch.step)
        is_done = trainer_state.is_done
        pause = batch.is_last_of_epoch or is_done
        if pause or trainer_state.steps_done == 1:
            group.synchronize_device()
        if not continues:
            self._stopwatch.step_done(batch.size, pause=pause)
        if is_done:
            self.finish()
        rate = updates[0].last_rate(rates[0])
        self.step_logger.add(
            batch,
            trainer_state.last_loss,
            rate,
            may_continue=update is not None,
            continues=continues,
        )
        if self._named_updates:
            scalars = {
                each.scalar_name("loss"): loss for each, loss in zip(updates, losses, strict=True)
            }
            scalars |= {
                each.scalar_name("learning_rate"): rate
                for each, rate in zip(updates, rates, strict=True)
            }
            self.step_logger.log(batch.step, scalars)
        for each in updates:
            if group_rates := each.group_scalars(batch.step):
                self.step_logger.log(batch.step, group_rates)
        for each in applied:
            if norms := each.gradient_norms():
                trainer_state.last_gradient_norm = next(iter(norms.values()))
                self.step_logger.log(batch.step, norms)
        if self._shares is not None and not is_done and self._shares.step_done():
            counts = enumerate(self._shares.counts)
            self.step_logger.log(batch.step, {f"parts_of_replica_{r}": n for r, n in counts})
        if self._has_savepoints and (is_done or self._strategy.is_savepoint(batch.step)):
            self._note_savepoint()
        reporter.enter(BETWEEN_CALLS)
        return loss

    def _note_savepoint(self) -> None:
        """Notes that all replicas have the same state. Waits for late losses: nobody can once one is lost."""
        self.step_logger.flush()
        self.trainer_state.is_savepoint = True

    def _note_saved_between_updates(self, step: int, update: str) -> None:
        """Warns, once, that a checkpoint lacks an update of its step; `save_if_due` then saves again."""
        self.trainer_state.saved_step = None
        if self._reporter.rank == 0 and not self._has_warned_of_partial_save:
            text = (
                f"the checkpoint after step {step} was saved before update {update!r} of that step, and a run"
                " that resumes from it goes on without this update. Save after the last update of a step."
            )
            self._reporter.emit(Warned(text=text))
        self._has_warned_of_partial_save = True

    def _is_stop_requested(self) -> bool:
        """Whether the launcher has requested that training ends early, the same on all processes."""
        if self._stop_consensus is None:
            return False
        request = CheckpointRequest(end=self._reporter.is_stop_requested)
        return self._stop_consensus.all_reduce_requests(self.trainer_state.steps_done, request).end

    def refusals(self) -> dict[str, str]:
        """The reasons to refuse a run of several replicas, by check code; found on the first batch."""
        refusals: dict[str, str] = {}
        transformed = self._loader.transformed
        checks_transform = transformed.checks_transform
        self._peeked, transformed.checks_transform = None, True
        try:
            batch = self.next_batch()
        except RefusedError as error:
            refusals[error.code] = error.detail
            batch = self.next_batch()
        transformed.checks_transform = checks_transform
        detail = None
        with contextlib.suppress(UnsupportedError), self._reporter.doing("try loss"):
            detail = None if batch is None else self.loss_check.difference(batch)
        return refusals if detail is None else refusals | {LOSS: detail}

    def finish(self) -> None:
        """Finalizes weights and strategy after the last step; does nothing the second time."""
        self._profiler.stop()
        if not self.trainer_state.is_finished:
            self.trainer_state.is_finished = True
            if self._finalize_weights is not None:
                self._finalize_weights()
            self._strategy.finished(self._group)
            if self._has_savepoints:
                self._note_savepoint()
