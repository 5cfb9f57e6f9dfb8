"""Reports of rank 0 to the launcher: losses, learning rates and scalars of steps, and progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from math import isnan
from typing import Self

from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.events import Progress, Scalars, Steps
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.nan_guard import NanGuard, explain_nan
from isotrain.core.session.training.timers import Stopwatch

STEPS_AT_ONCE = 500
"""Number of steps in a full block."""
STEPS_SECONDS = 2.0
"""Longest time between two blocks, in seconds."""
PROGRESS_SECONDS = 0.2
"""Shortest time between two progress reports, in seconds."""


class StepLogger:
    """Reports steps and their scalars to the launcher in blocks of 500 or two seconds, and progress.

    Reading a loss waits for the device, so losses are not read at each step: those of a block are read when
    the block is sent, and the newest one for progress, at most five times a second. A loss that is not
    ready by then is left for a later report.

    Attributes:
        is_silent: Whether steps are neither recorded nor reported.
    """

    def __init__(
        self,
        reporter: Reporter,
        stopwatch: Stopwatch,
        total_steps: int,
        nan_guard: NanGuard,
        *,
        is_silent: bool = False,
    ) -> None:
        self.is_silent = is_silent
        self._reporter = reporter
        self._nan_guard = nan_guard
        self._stopwatch = stopwatch
        self._total = total_steps
        self._first = 0
        self._may_continue = False
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._epoch_sum = 0.0
        self._epoch_samples = 0
        self._rates: list[float] = []
        self._scalars: list[tuple[int, Mapping[str, Tensor | float]]] = []
        self._newest_reported: float | None = None
        self._steps_due = 0.0
        self._progress_due = 0.0
        self._unreported: tuple[int, int] | None = None
        """Epoch and step of the newest step, unless its progress was reported."""

    @classmethod
    def of(
        cls,
        session_context: SessionContext,
        reporter: Reporter,
        stopwatch: Stopwatch,
        total_steps: int,
    ) -> Self:
        """The logger of a process: only rank 0 reports, and only to a launcher or for `on_nan`.

        Other ranks of an elastic run keep the records, for one of them may become rank 0.
        """
        spec = session_context.spec
        explain = partial(
            explain_nan,
            samples=session_context.loaders.samples,
            plan=session_context.plan,
            group=session_context.group,
            compiles=spec.compile,
        )
        on_nan = "ignore" if reporter.rank and spec.on_nan != "skip" else spec.on_nan
        nan_guard = NanGuard(on_nan, reporter, explain)
        is_main = reporter.rank == 0
        reports = spec.elastic or (is_main and (reporter.has_listener or spec.on_nan != "ignore"))
        return cls(reporter, stopwatch, total_steps, nan_guard, is_silent=not reports)

    def add(
        self,
        batch: Batch,
        loss: Tensor,
        learning_rate: float,
        *,
        may_continue: bool = False,
        continues: bool = False,
    ) -> None:
        """Records a step, whose mean loss, a scalar tensor, may not be computed yet.

        Args:
            batch: Batch of the step.
            loss: Mean loss of the step, the sum over its updates so far.
            learning_rate: Learning rate of the step.
            may_continue: Whether a later call may be of the same step: its record is sent after the next.
            continues: Whether the last call was of the same step, whose record this one replaces.
        """
        if self.is_silent:
            return
        if continues and self._losses:
            self._losses[-1] = loss
            return
        if continues and self._epoch_samples and self._newest_reported is not None:
            self._count_in_epoch(self._newest_reported, -batch.size)
        self._may_continue = may_continue
        if batch.step != self._first + len(self._losses):  # after a seek
            self.flush()
            self._first = batch.step
        self._losses.append(loss)
        self._sizes.append(batch.size)
        self._rates.append(learning_rate)
        self._unreported = batch.epoch, batch.step
        now = time.monotonic()
        if now >= self._progress_due:
            self._report_progress(*self._unreported)
        if len(self._losses) >= STEPS_AT_ONCE or now >= self._steps_due:
            self._report_steps(self._ready_count())
            self._report_scalars(self._ready_scalars())

    def log(self, step: int, scalars: Mapping[str, Tensor | float]) -> None:
        """Records named scalars of a step, which are read when steps are reported: they must not change.

        Args:
            step: Index of the step, from 0 over the run.
            scalars: Numbers or scalar tensors, which may not be computed yet, by name.
        """
        if self.is_silent:
            return
        self._scalars.append((step, scalars))
        if len(self._scalars) >= STEPS_AT_ONCE:
            self._report_scalars(self._ready_scalars())

    def flush(self) -> None:
        """Reports all steps and scalars so far; waits for them."""
        self._report_steps(len(self._losses))
        self._report_scalars(len(self._scalars))

    def finish(self) -> None:
        """Reports all steps, and the progress of the last one."""
        self.flush()
        if self._unreported is not None and not self.is_silent:
            self._report_progress(*self._unreported)

    def stop(self) -> None:
        """Reports all steps so far, and none from here on."""
        self.flush()
        self.is_silent = True

    def epoch_loss(self) -> float | None:
        """The mean loss over the samples of all steps reported since the last call; None without any."""
        total, samples = self._epoch_sum, self._epoch_samples
        self._epoch_sum, self._epoch_samples = 0.0, 0
        return total / samples if samples else None

    @property
    def epoch_so_far(self) -> tuple[float, int]:
        """Loss sum (each loss times its samples) and number of samples reported since `epoch_loss`."""
        return self._epoch_sum, self._epoch_samples

    def resume_from(
        self, step: int, last_loss: float | None, epoch_sum: float, epoch_samples: int
    ) -> None:
        """Continues from a checkpoint.

        Args:
            step: Next step.
            last_loss: Loss of the step before; None before the first.
            epoch_sum: Loss sum of the epoch so far, as `epoch_so_far`.
            epoch_samples: Number of samples of the epoch so far.
        """
        if self.is_silent:
            return
        self.flush()
        self._steps_due = 0.0  # the first step is reported at once, as in a new run
        self._first, self._newest_reported = step, last_loss
        self._epoch_sum, self._epoch_samples = epoch_sum, epoch_samples

    def _report_progress(self, epoch: int, step: int) -> None:
        loss = self._newest_loss() if self._reporter.rank == 0 else None
        if loss is None:
            return
        if isnan(loss):
            self._report_steps(self._ready_count())
        self._progress_due = time.monotonic() + PROGRESS_SECONDS
        self._unreported = None
        self._reporter.emit(
            Progress(
                done=step + 1,
                total=self._total,
                epoch=epoch,
                loss=loss,
                samples_per_s=self._stopwatch.samples_per_second,
            )
        )

    def _newest_loss(self) -> float | None:
        """The newest loss that is computed already: that of an asynchronous step may come later."""
        ready = (loss for loss in reversed(self._losses) if _is_ready(loss))
        newest = next(ready, self._newest_reported)
        return None if newest is None else float(newest)

    def _ready_count(self) -> int:
        """Number of steps that can be reported without waiting for a loss."""
        count = len(self._losses) - self._may_continue
        late = (i for i, loss in enumerate(self._losses[:count]) if not _is_ready(loss))
        return next(late, count)

    def _report_steps(self, count: int) -> None:
        self._steps_due = time.monotonic() + STEPS_SECONDS
        if count == 0:
            return
        losses = [float(loss) for loss in self._losses[:count]]
        rates = self._rates[:count]
        self._reporter.report(Steps(first=self._first, losses=losses, learning_rates=rates))
        sizes = self._sizes[:count]
        for loss, size in zip(losses, sizes, strict=True):
            self._count_in_epoch(loss, size)  # one by one: however blocks are cut, to the same bits
        del self._losses[:count], self._rates[:count], self._sizes[:count]
        self._first += count
        self._newest_reported = losses[-1]
        self._nan_guard.check(self._first - count, losses)

    def _count_in_epoch(self, loss: float, samples: int) -> None:
        if self._nan_guard.counts(loss):
            self._epoch_sum += loss * samples
            self._epoch_samples += samples

    def _ready_scalars(self) -> int:
        """Number of records of scalars that can be reported without waiting."""
        late = (
            i for i, (_, each) in enumerate(self._scalars) if not all(map(_is_ready, each.values()))
        )
        return next(late, len(self._scalars))

    def _report_scalars(self, count: int) -> None:
        if count == 0:
            return
        steps, records = zip(*self._scalars[:count], strict=True)
        values = [{name: float(value) for name, value in each.items()} for each in records]
        self._reporter.report(Scalars(steps=steps, values=values))
        del self._scalars[:count]


def _is_ready(loss: Tensor) -> bool:
    """Whether reading a scalar would not wait for a parameter server or for other replicas."""
    return bool(getattr(loss, "is_ready", True))
