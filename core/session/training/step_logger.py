"""What rank 0 tells of its steps: losses and learning rates in blocks, none of which it keeps."""

from __future__ import annotations

import time
from functools import partial
from math import isnan
from typing import Self

from isotrain.core.contracts.events import Progress, Steps
from isotrain.core.contracts.replica import Tensor
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.nan_guard import NanGuard, explain_nan
from isotrain.core.session.training.timers import Stopwatch

STEPS_AT_ONCE = 500
STEPS_SECONDS = 2.0
"""After so long the losses that have come are told, also where they are fewer."""
PROGRESS_SECONDS = 0.2
"""How often it is told how far the run is."""


class StepLogger:
    """Tells the launcher of every step, in blocks of 500 steps or two seconds, and how far the run is.

    To read a loss is to wait for the device. So none is read for each step: those of a block are read when it
    is told, and the newest one for the progress, five times a second at most. Only the steps in which that
    happens wait; a loss that comes later than its step is left for a later one.

    Attributes:
        is_silent: Whether it takes no steps, and tells of none.
    """

    def __init__(
        self,
        reporter: Reporter,
        stopwatch: Stopwatch,
        total_steps: int,
        watch: NanGuard,
        *,
        is_silent: bool = False,
    ) -> None:
        self.is_silent = is_silent
        self._reporter = reporter
        self._watch = watch
        self._stopwatch = stopwatch
        self._total = total_steps
        self._first = 0
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._epoch_sum = 0.0
        self._epoch_samples = 0
        self._rates: list[float] = []
        self._newest: float | None = None
        self._steps_due = 0.0
        self._progress_due = 0.0

    @classmethod
    def of(
        cls,
        session_context: SessionContext,
        reporter: Reporter,
        stopwatch: Stopwatch,
        total_steps: int,
    ) -> Self:
        """Those of a process: only rank 0 tells, and only where somebody listens or losses are watched."""
        spec = session_context.spec
        blame = partial(
            explain_nan,
            samples=session_context.loaders.samples,
            plan=session_context.plan,
            group=session_context.group,
        )
        watch = NanGuard(spec.on_nan, reporter, blame)
        is_told = reporter.rank == 0 and (reporter.has_listener or spec.on_nan != "ignore")
        return cls(reporter, stopwatch, total_steps, watch, is_silent=not is_told)

    def add(self, batch: Batch, loss: Tensor, learning_rate: float) -> None:
        """Takes a step that was done.

        Args:
            batch: What it trained on.
            loss: Its mean loss, which need not be known yet.
            learning_rate: Of the step.
        """
        if self.is_silent:
            return
        if batch.step != self._first + len(self._losses):  # somebody has sought another step
            self.flush()
            self._first = batch.step
        self._losses.append(loss)
        self._sizes.append(batch.size)
        self._rates.append(learning_rate)
        now = time.monotonic()
        if now >= self._progress_due:
            self._tell_progress(batch)
        if len(self._losses) >= STEPS_AT_ONCE or now >= self._steps_due:
            self._tell_steps(self._known())

    def flush(self) -> None:
        """Tells of all steps so far; waits for their losses."""
        self._tell_steps(len(self._losses))

    def end(self) -> None:
        """Tells of all steps so far, and of none from here on."""
        self.flush()
        self.is_silent = True

    def epoch_loss(self) -> float | None:
        """The mean loss over the samples of all steps that were told of since the last call."""
        total, samples = self._epoch_sum, self._epoch_samples
        self._epoch_sum, self._epoch_samples = 0.0, 0
        return total / samples if samples else None

    @property
    def epoch_so_far(self) -> tuple[float, int]:
        """The sum of the losses told of since the last `epoch_loss`, each times its samples; and these."""
        return self._epoch_sum, self._epoch_samples

    def resume_from(self, step: int, epoch_sum: float, epoch_samples: int) -> None:
        """Makes `step` the next; the epoch's sums are those of a run that has come so far."""
        if self.is_silent:
            return
        self.flush()
        self._steps_due = 0.0  # the first step is told at once, as that of a run from the start
        self._first = step
        self._epoch_sum, self._epoch_samples = epoch_sum, epoch_samples

    def _tell_progress(self, batch: Batch) -> None:
        loss = self._newest_loss()
        if loss is None:
            return
        if isnan(loss):
            self._tell_steps(self._known())
        self._progress_due = time.monotonic() + PROGRESS_SECONDS
        self._reporter.emit(
            Progress(
                done=batch.step + 1,
                total=self._total,
                epoch=batch.epoch,
                loss=loss,
                samples_per_s=self._stopwatch.samples_per_second,
            )
        )

    def _newest_loss(self) -> float | None:
        """The newest loss that is already there: that of an asynchronous step may come later."""
        known = (loss for loss in reversed(self._losses) if _is_known(loss))
        newest = next(known, self._newest)
        return None if newest is None else float(newest)

    def _known(self) -> int:
        """How many steps can be told of without waiting for another one."""
        late = (i for i, loss in enumerate(self._losses) if not _is_known(loss))
        return next(late, len(self._losses))

    def _tell_steps(self, count: int) -> None:
        self._steps_due = time.monotonic() + STEPS_SECONDS
        if count == 0:
            return
        losses = [float(loss) for loss in self._losses[:count]]
        rates = self._rates[:count]
        self._reporter.emit(Steps(first=self._first, losses=losses, learning_rates=rates))
        sizes = self._sizes[:count]
        for loss, size in zip(losses, sizes, strict=True):
            self._epoch_sum += loss * size  # one by one: however blocks are cut, to the same bits
        self._epoch_samples += sum(sizes)
        del self._losses[:count], self._rates[:count], self._sizes[:count]
        self._first += count
        self._newest = losses[-1]
        self._watch.check(self._first - count, losses)


def _is_known(loss: Tensor) -> bool:
    return bool(getattr(loss, "is_ready", True))
