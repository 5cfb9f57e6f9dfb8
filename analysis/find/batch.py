"""`isotrain.find_batch`: the largest global batch that fits into memory, by short runs."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from isotrain.analysis.find.trial import launch_trial, trial_spec
from isotrain.core.errors import RunFailedError, SpecError
from isotrain.core.planning.cluster_environment import require_single_process
from isotrain.core.reporting.status import OnProgress, default_progress, noting_interrupt
from isotrain.core.run.options import ResumeOptions, require_known
from isotrain.core.spec.loading import SpecLike, load_spec

if TYPE_CHECKING:
    from isotrain.core.session.session import Session

STEPS = 3
"""Default number of steps of a trial."""
_OUT_OF_MEMORY = re.compile(
    r"MemoryError|out of memory|OutOfMemory|ResourceExhausted", re.IGNORECASE
)
_PRECISION = 8
"""Part of the largest batch that fits, to which it is found."""


@dataclass(frozen=True)
class BatchTrial:
    """A few training steps with one global batch size.

    Attributes:
        global_batch_size: Samples per step over all replicas.
        fits: Whether all steps were taken.
        samples_per_second: Throughput after the first step; None if there was one step, or it does not fit.
        reason: How the run failed; None if it fits.
    """

    global_batch_size: int
    fits: bool
    samples_per_second: float | None = None
    reason: str | None = None

    @property
    def outcome(self) -> str:
        """The reason why it does not fit, or that it fits, with the throughput."""
        if self.samples_per_second is None:
            return self.reason or "fits"
        return f"fits, {self.samples_per_second:.4g} samples/s"


@dataclass(frozen=True)
class BatchSearch:
    """Trials of a search for the largest global batch, in order.

    Attributes:
        trials: The trials.
        samples: Number of training samples, which bounds the global batch; None for streams.
    """

    trials: tuple[BatchTrial, ...]
    samples: int | None

    @property
    def largest(self) -> int | None:
        """The largest global batch size that fits; None if none does."""
        return max((each.global_batch_size for each in self.trials if each.fits), default=None)

    @property
    def fastest(self) -> int | None:
        """The global batch size with the highest throughput; None if none was measured."""
        measured = [each for each in self.trials if each.samples_per_second is not None]
        best = max(measured, key=lambda each: each.samples_per_second or 0.0, default=None)
        return None if best is None else best.global_batch_size

    def to_dict(self) -> dict[str, Any]:
        """The search as JSON values."""
        return {**asdict(self), "largest": self.largest, "fastest": self.fastest}


def find_batch(
    spec: SpecLike,
    *,
    backend: str | None = None,
    first_batch: int | None = None,
    largest_batch: int | None = None,
    steps: int = STEPS,
    on_progress: OnProgress | None = None,
    **options: Unpack[ResumeOptions],
) -> BatchSearch:
    """Searches for the largest global batch: doubles it until memory runs out, then bisects.

    Each trial is a run in processes of its own, so that one that is killed ends nothing else. The result is
    exact to an eighth, and no larger than the training data.

    Args:
        spec: Training spec, as for `isotrain.run`.
        backend: Backend to train on, as for `run`.
        first_batch: First global batch size; left out: the spec's.
        largest_batch: Largest global batch size to try; left out: the number of training samples.
        steps: Number of steps of a trial.
        on_progress: Callback that receives one line of text after each trial; left out: the lines are shown
            in a terminal or notebook.
        **options: Options of `isotrain.run`, but `output` and `resume`.

    Raises:
        SpecError: The spec is wrong.
        UnsupportedError: A launcher has started this process as one of several.
        RunFailedError: A run failed, and not because of memory.
    """
    require_known("find_batch", ResumeOptions, options)
    require_single_process("find_batch")
    checked = load_spec(spec)
    if not (
        steps >= 1
        and (first_batch is None or first_batch >= 1)
        and (largest_batch is None or largest_batch >= 1)
    ):
        raise SpecError(
            "find_batch: expected first_batch, largest_batch and steps of at least 1, received"
            f" first_batch={first_batch}, largest_batch={largest_batch}, steps={steps}."
        )
    tell = on_progress or default_progress(options.get("quiet", False))
    trials: list[BatchTrial] = []
    samples: int | None = None

    def fits(size: int) -> bool:
        nonlocal samples
        changed = trial_spec(checked, steps=steps, global_batch_size=size, local_batch_size=None)
        try:
            with noting_interrupt(_left_by_interrupt(BatchSearch(tuple(trials), samples).largest)):
                measured = launch_trial(partial(_measure, steps=steps), changed, backend, options)
        except RunFailedError as error:
            if not _is_out_of_memory(error):
                raise
            trials.append(BatchTrial(size, fits=False, reason=str(error).splitlines()[0]))
        else:
            samples = measured["samples"]
            trials.append(BatchTrial(size, True, measured["samples_per_second"]))
        tell(f"global batch {size}: {trials[-1].outcome}")
        return trials[-1].fits

    size = first_batch or checked.resolve_global_batch_size(options.get("replicas") or 1)
    size = min(size, largest_batch or size)
    low, high = 0, size
    while fits(high):
        low, bound = high, min(largest_batch or high * 2, samples or high * 2)
        if high >= bound:
            return BatchSearch(tuple(trials), samples)
        high = min(high * 2, bound)
    while high - low > max(1, low // _PRECISION):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return BatchSearch(tuple(trials), samples)


def _left_by_interrupt(largest: int | None) -> str:
    """Note for an interrupt of the next trial: what is left of the search, and how to go on."""
    if largest is None:
        return "No global batch has fitted yet. To start again, use the same command."
    return (
        f"The largest global batch that has fitted: {largest}.\n"
        f"to go on from it: add --first-batch {largest} to the same command"
    )


def _is_out_of_memory(error: RunFailedError) -> bool:
    """Whether a run failed for lack of memory, as far as its error says; a kill by the system says so."""
    return _OUT_OF_MEMORY.search(str(error)) is not None


def _measure(session: Session, *, steps: int) -> dict[str, Any]:
    """Takes the steps, and measures throughput after the first. Collective."""
    begin, taken = 0.0, 0
    for batch in session.batches():
        float(session.step(batch))
        if batch.step == 0:
            begin = time.perf_counter()
        else:
            taken += batch.size
    seconds = time.perf_counter() - begin
    return {
        "samples": session.plan.samples,
        "samples_per_second": taken / seconds if taken else None,
    }
