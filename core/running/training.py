"""The steps of a session: their batches, their rates, and what is told of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.replica import Tensor
from isotrain.core.contracts.reporter import BETWEEN_CALLS, Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.data.refusals import LOSS, RefusedError
from isotrain.core.errors import DataError, IsotrainError, SpecError, UnsupportedError
from isotrain.core.planning.single_samples import batches_with_single, refused
from isotrain.core.running.agreement import require_same_samples
from isotrain.core.running.course import Course
from isotrain.core.running.equipment import Equipment
from isotrain.core.running.learning_rates import LearningRates
from isotrain.core.running.loss_trial import LossTrial
from isotrain.core.running.needed_targets import needs_targets, no_targets
from isotrain.core.running.step_reports import StepReports
from isotrain.core.running.stopwatch import Stopwatch
from isotrain.core.spec.optimizers import CustomOptimizer
from isotrain.core.spec.parts import ConstantSchedule
from isotrain.core.spec.training_spec import TrainingSpec


class Training:
    """Takes the steps of a run by its strategy; every process calls it alike.

    Its methods get the group, for who watches what a strategy does gives the session another one.

    Attributes:
        course: How far it has come.
        rates: The spec's, before what `course` multiplies them by.
        loss_trial: Compares the loss of a batch with the mean over its parts.
        reports: What rank 0 tells of the steps.
    """

    def __init__(self, equipment: Equipment, reporter: Reporter, stopwatch: Stopwatch) -> None:
        self._strategy = equipment.strategy
        self._reporter = reporter
        self._stopwatch = stopwatch
        self._loader = loader = equipment.loaders.training()
        self._train = equipment.loaders.data.train
        self._needs_targets = needs_targets(equipment.spec, equipment.plan.framework)
        self._plan = equipment.plan
        self._seen: tuple[tuple[int, int], Batch | None] | None = None
        self._single = batches_with_single(equipment.spec, self._plan, self._plan.samples)
        self.course = Course(loader.steps_per_epoch, loader.total_steps)
        self.rates = LearningRates(
            equipment.spec,
            equipment.group.own_rates(),
            global_batch=equipment.plan.global_batch,
            steps_per_epoch=loader.steps_per_epoch,
            total_steps=loader.total_steps,
        )
        self._group = equipment.group
        self._is_own = isinstance(equipment.spec.optimizer, CustomOptimizer)
        self._require_one_source_of_rates(equipment.spec)
        self._finalise_weights = equipment.group.weight_finaliser()
        if self._finalise_weights and self._strategy.keeps_replicas_equal != "always":
            raise SpecError(
                f"optimizer.custom: use_ema: under strategy {self._strategy.name} each replica trains weights"
                " of its own, and an average of these is not that of the run. Leave it out, or use strategy"
                " data-parallel."
            )
        self.loss_trial = LossTrial(equipment, reporter)
        self.reports = StepReports.of(equipment, reporter, stopwatch, loader.total_steps)

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
        return self.rates(step) * self.course.rate_factor

    def known_rate(self, step: int) -> float:
        """As `rate`; or what an optimizer that sets its rates itself used last, or uses next.

        Raises:
            IsotrainError: Such an optimizer says nothing of that step.
        """
        if (own := self._group.optimizer_rates()) is None:
            return self.rate(step)
        known = dict(zip((self.course.steps_done - 1, self.course.steps_done), own, strict=True))
        if step not in known:
            raise IsotrainError(
                f"learning_rate: the optimizer sets its rates itself, and that of step {step} is not known:"
                f" after {self.course.steps_done} steps, those of the last and the next one are."
            )
        return known[step]

    def batches(self, group: ReplicaGroup) -> Iterator[Batch]:
        """Yields from the next step to the run's end, or from where a checkpoint has taken it meanwhile."""
        self._seen = None  # whose memory nobody needs any more
        returns = -1
        while returns != self.course.returns:
            returns = self.course.returns
            yield from self._tried(self._batches_until_restored(group), group)

    def next_batch(self, group: ReplicaGroup) -> Batch | None:
        """The next one, to look at; None after the last. It is read once: a stream may give another then."""
        place = self.course.steps_done, self.course.returns
        if self._seen is None or self._seen[0] != place:
            self._seen = place, next(self._batches_until_restored(group), None)
        return self._seen[1]

    def _batches_until_restored(self, group: ReplicaGroup) -> Iterator[Batch]:
        course, returns = self.course, self.course.returns
        self._reporter.enter("next batch")
        for batch in self._loader.from_step(course.steps_done, course.mark):
            if course.is_stopped or returns != course.returns:
                break
            require_same_samples(group, batch)
            if self._needs_targets and batch.slices[0][0].targets is None:
                raise no_targets(self._train, batch.slices[0][0].inputs)
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
            if self.loss_trial.is_due:
                self.loss_trial.require_mean(batch)
            if self._single and (layer := group.refuses_one(batch)):
                raise DataError(f"data: {refused(layer, self._plan, self._single)}")
            yield batch
        yield from batches

    def step(self, group: ReplicaGroup, batch: Batch) -> Tensor:
        """Trains on one global batch; returns its mean loss."""
        reporter, course = self._reporter, self.course
        course.require_no_predictions("step")
        reporter.step = batch.step
        reporter.enter("step")
        rate = self.rate(batch.step)
        course.is_finished = False
        loss = self._strategy.step(group, batch, rate)
        course.last_loss = loss
        course.steps_done, course.mark = batch.step + 1, batch.mark
        is_done = course.is_done
        pause = batch.is_last_of_epoch or is_done
        if pause or course.steps_done == 1:
            group.synchronise_device()
        self._stopwatch.step_done(batch.size, pause=pause)
        if is_done:
            self.finish(group)
        if self._is_own and (used := group.optimizer_rates()) is not None:
            rate = used[0]
        self.reports.add(batch, loss, rate)
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
            detail = None if batch is None else self.loss_trial.difference(batch)
        return found if detail is None else found | {LOSS: detail}

    def finish(self, group: ReplicaGroup) -> None:
        """Lets optimizer and strategy do what they have left to do, once."""
        if not self.course.is_finished:
            self.course.is_finished = True
            if self._finalise_weights is not None:
                self._finalise_weights()
            self._strategy.finished(group)
