"""The steps of a session: their batches, their rates, and what is told of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from isotrain.core.contracts.replica import Tensor
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import BETWEEN_CALLS, Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.data.map_style import BatchIndexed, MapStyle
from isotrain.core.data.refusals import LOSS, RefusedError
from isotrain.core.errors import DataError, IsotrainError, SpecError, UnsupportedError
from isotrain.core.planning.single_sample_slices import (
    batches_with_single_sample,
    single_sample_refusal,
)
from isotrain.core.session.training.consensus import require_same_samples
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.loss_check import LossCheck
from isotrain.core.session.training.lr_schedule import LearningRates
from isotrain.core.session.training.step_logger import StepLogger
from isotrain.core.session.training.timers import Stopwatch
from isotrain.core.session.training.trainer_state import TrainerState
from isotrain.core.spec.optimizers import CustomOptimizer
from isotrain.core.spec.sections import ConstantSchedule
from isotrain.core.spec.training_spec import TrainingSpec


def needs_targets(spec: TrainingSpec, framework: str) -> bool:
    """Whether a loss for a framework is one with a name; what a person's own ones need is their affair."""
    return any(not loss.is_reference for loss in spec.losses(framework).values())


def missing_targets_error(source: Any, inputs: Any) -> DataError:
    """What to say of samples that have inputs only.

    Args:
        source: What they come from.
        inputs: Of a batch of them.
    """
    told = "data: the samples have no targets, with which the loss compares the predictions."
    if not isinstance(inputs, Mapping) or not isinstance(source, BatchIndexed | MapStyle):
        return DataError(f"{told} Give pairs (inputs, targets).")
    names = ", ".join(map(repr, inputs))
    return DataError(
        f"{told} Each is a dict of {names}: say which of them are the targets, as in"
        f" isotrain.sources.{type(source).__name__}(data, inputs=..., targets=...)."
    )


class TrainLoop:
    """Takes the steps of a run by its strategy; every process calls it alike.

    Its methods get the group, for who watches what a strategy does gives the session another one.

    Attributes:
        trainer_state: How far it has come.
        rates: The spec's, before what `trainer_state` multiplies them by.
        loss_check: Compares the loss of a batch with the mean over its parts.
        step_logger: What rank 0 tells of the steps.
    """

    def __init__(
        self, session_context: SessionContext, reporter: Reporter, stopwatch: Stopwatch
    ) -> None:
        self._strategy = session_context.strategy
        self._reporter = reporter
        self._stopwatch = stopwatch
        self._loader = loader = session_context.loaders.training()
        self._train = session_context.loaders.data.train
        self._needs_targets = needs_targets(session_context.spec, session_context.plan.framework)
        self._plan = session_context.plan
        self._seen: tuple[tuple[int, int], Batch | None] | None = None
        self._single = batches_with_single_sample(
            session_context.spec, self._plan, self._plan.samples
        )
        self.trainer_state = TrainerState(loader.steps_per_epoch, loader.total_steps)
        self.rates = LearningRates(
            session_context.spec,
            session_context.group.optimizer_lr_schedule(),
            global_batch_size=session_context.plan.global_batch_size,
            steps_per_epoch=loader.steps_per_epoch,
            total_steps=loader.total_steps,
        )
        self._group = session_context.group
        self._is_own = isinstance(session_context.spec.optimizer, CustomOptimizer)
        self._require_one_source_of_rates(session_context.spec)
        self._finalise_weights = session_context.group.weight_finalizer()
        if self._finalise_weights and self._strategy.keeps_replicas_equal != "always":
            raise SpecError(
                f"optimizer.custom: use_ema: under strategy {self._strategy.name} each replica trains weights"
                " of its own, and an average of these is not that of the run. Leave it out, or use strategy"
                " data-parallel."
            )
        self.loss_check = LossCheck(session_context, reporter)
        self.step_logger = StepLogger.of(session_context, reporter, stopwatch, loader.total_steps)

    def _require_one_source_of_rates(self, spec: TrainingSpec) -> None:
        """Refuses rates that an optimizer with a scheduler of its own would lose.

        Raises:
            SpecError: The spec has such.
        """
        is_constant = spec.schedule == ConstantSchedule() and self.rates.peak == spec.optimizer.lr
        if not is_constant and self._group.optimizer_rates() is not None:
            raise SpecError(
                "optimizer.custom: its learning-rate scheduler sets the rates, and so do schedule and"
                " scaling. Leave one of the two out."
            )

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 0 over the whole run, as it is scaled now. Local."""
        return self.rates(step) * self.trainer_state.rate_factor

    def known_rate(self, step: int) -> float:
        """As `rate`; or what an optimizer that sets its rates itself used last, or uses next.

        Raises:
            IsotrainError: Such an optimizer says nothing of that step.
        """
        if (own := self._group.optimizer_rates()) is None:
            return self.rate(step)
        known = dict(
            zip(
                (self.trainer_state.steps_done - 1, self.trainer_state.steps_done), own, strict=True
            )
        )
        if step not in known:
            raise IsotrainError(
                f"learning_rate: the optimizer sets its rates itself, and that of step {step} is not known:"
                f" after {self.trainer_state.steps_done} steps, those of the last and the next one are."
            )
        return known[step]

    def batches(self, group: ReplicaGroup) -> Iterator[Batch]:
        """Yields from the next step to the run's end, or from where a checkpoint has taken it meanwhile."""
        self._seen = None  # whose memory nobody needs any more
        restore_count = -1
        while restore_count != self.trainer_state.restore_count:
            restore_count = self.trainer_state.restore_count
            yield from self._tried(self._batches_until_restored(group), group)

    def next_batch(self, group: ReplicaGroup) -> Batch | None:
        """The next one, to look at; None after the last. It is read once: a stream may give another then."""
        place = self.trainer_state.steps_done, self.trainer_state.restore_count
        if self._seen is None or self._seen[0] != place:
            self._seen = place, next(self._batches_until_restored(group), None)
        return self._seen[1]

    def _batches_until_restored(self, group: ReplicaGroup) -> Iterator[Batch]:
        trainer_state, restore_count = self.trainer_state, self.trainer_state.restore_count
        self._reporter.enter("next batch")
        for batch in self._loader.from_step(trainer_state.steps_done, trainer_state.mark):
            if trainer_state.is_stopped or restore_count != trainer_state.restore_count:
                break
            require_same_samples(group, batch)
            if self._needs_targets and batch.slices[0][0].targets is None:
                raise missing_targets_error(self._train, batch.slices[0][0].inputs)
            self._reporter.enter(BETWEEN_CALLS)
            yield batch
            self._reporter.enter("next batch")
        self._reporter.enter(BETWEEN_CALLS)

    def _tried(self, batches: Iterator[Batch], group: ReplicaGroup) -> Iterator[Batch]:
        """The batches, with the first of which loss and model are tried before it is given.

        Raises:
            RefusedError: The loss is not a mean over samples.
            DataError: The model does not take slices of one sample, and there are some.
        """
        for batch in itertools.islice(batches, 1):
            if self.loss_check.is_due:
                self.loss_check.require_mean(batch)
            if self._single and (layer := group.refuses_single_sample(batch)):
                raise DataError(f"data: {single_sample_refusal(layer, self._plan, self._single)}")
            yield batch
        yield from batches

    def step(self, group: ReplicaGroup, batch: Batch) -> Tensor:
        """Trains on one global batch; returns its mean loss."""
        reporter, trainer_state = self._reporter, self.trainer_state
        trainer_state.require_no_predictions("step")
        reporter.step = batch.step
        reporter.enter("step")
        rate = self.rate(batch.step)
        trainer_state.is_finished = False
        loss = self._strategy.step(group, batch, rate)
        trainer_state.last_loss = loss
        trainer_state.steps_done, trainer_state.mark = batch.step + 1, batch.mark
        is_done = trainer_state.is_done
        pause = batch.is_last_of_epoch or is_done
        if pause or trainer_state.steps_done == 1:
            group.synchronize_device()
        self._stopwatch.step_done(batch.size, pause=pause)
        if is_done:
            self.finish(group)
        if self._is_own and (used := group.optimizer_rates()) is not None:
            rate = used[0]
        self.step_logger.add(batch, loss, rate)
        reporter.enter(BETWEEN_CALLS)
        return loss

    def refusals(self, group: ReplicaGroup) -> dict[str, str]:
        """What a run of several replicas is refused for, by codes of the check."""
        found: dict[str, str] = {}
        tries_transform = self._loader.tries_transform
        self._seen, self._loader.tries_transform = None, True
        try:
            batch = self.next_batch(group)
        except RefusedError as error:
            found[error.code] = error.detail
            batch = self.next_batch(group)
        self._loader.tries_transform = tries_transform
        detail = None
        with contextlib.suppress(UnsupportedError), self._reporter.doing("try loss"):
            detail = None if batch is None else self.loss_check.difference(batch)
        return found if detail is None else found | {LOSS: detail}

    def finish(self, group: ReplicaGroup) -> None:
        """Lets optimizer and strategy do what they have left to do, once."""
        if not self.trainer_state.is_finished:
            self.trainer_state.is_finished = True
            if self._finalise_weights is not None:
                self._finalise_weights()
            self._strategy.finished(group)
