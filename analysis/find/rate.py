"""`isotrain.find_rate`: the learning-rate range test (Smith 2017), by one short run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from isotrain.analysis.find.rate_search import RateSearch
from isotrain.analysis.find.trial import launch_trial, trial_spec
from isotrain.core.errors import SpecError
from isotrain.core.planning.cluster_environment import require_single_process
from isotrain.core.reporting.status import noting_interrupt, waiting
from isotrain.core.run.options import ResumeOptions, require_known
from isotrain.core.spec.loading import SpecLike, load_spec

if TYPE_CHECKING:
    from isotrain.core.session.session import Session

FIRST, LAST, STEPS = 1e-7, 10.0, 100
"""Defaults of the first and the last rate, and of the number of steps between them."""
_INTERRUPTED = "Nothing is left of the search. To start again, use the same command."
_SMOOTHING = 0.95
_DIVERGED = 4.0
"""Multiple of the least smoothed loss beyond which the run has diverged."""
_SKIPPED = 10
"""Fraction of the steps at the start, as one in so many, whose means are of few losses: none is suggested."""
_WINDOW = 16
"""Fraction of the steps, as one in so many, before and after a step between which the slope is taken."""


def find_rate(
    spec: SpecLike,
    *,
    backend: str | None = None,
    first_rate: float = FIRST,
    last_rate: float = LAST,
    steps: int = STEPS,
    **options: Unpack[ResumeOptions],
) -> RateSearch:
    """Searches for a learning rate: trains while the rate rises, until the loss diverges.

    The run is a new one; nothing of it remains but the figures.

    Args:
        spec: Training spec, as for `isotrain.run`; its rate and schedule are not used.
        backend: Backend to train on, as for `run`.
        first_rate: Learning rate of the first step.
        last_rate: Learning rate of the last step.
        steps: Number of steps.
        **options: Options of `isotrain.run`, but `output` and `resume`.

    Raises:
        SpecError: The spec is wrong or has updates or no data, or the rates do not rise.
        UnsupportedError: A launcher has started this process as one of several.
        RunFailedError: A process failed.
    """
    require_known("find_rate", ResumeOptions, options)
    require_single_process("find_rate")
    if not (0 < first_rate < last_rate < math.inf and steps > 1):
        raise SpecError(
            "find_rate: expected 0 < first_rate < last_rate and 2 or more steps, received"
            f" first_rate={first_rate}, last_rate={last_rate}, steps={steps}."
        )
    checked = load_spec(spec)
    if checked.updates:
        raise SpecError(
            f"find_rate: the spec has updates ({', '.join(checked.updates)}), each with a rate of its own,"
            " and the search is for one. Search for the rate of a spec with one of these objectives, or"
            " compare runs with several rates."
        )
    changed = trial_spec(checked, steps=steps, schedule="constant")
    work = partial(_sweep, first=first_rate, last=last_rate, steps=steps)
    status = waiting("training while the learning rate rises", quiet=options.get("quiet", False))
    with status, noting_interrupt(_INTERRUPTED):
        found = launch_trial(work, changed, backend, options)
    smoothed = smoothed_losses(found["losses"])
    suggestion = steepest_rate(found["rates"], smoothed)
    return RateSearch(
        tuple(found["rates"]),
        tuple(found["losses"]),
        tuple(smoothed),
        suggestion,
        None
        if suggestion is None
        else suggestion / checked.scaling.factor(found["global_batch_size"]),
    )


def _sweep(session: Session, *, first: float, last: float, steps: int) -> dict[str, Any]:
    """Trains with rising rates until the loss diverges. Collective."""
    rates: list[float] = []
    losses: list[float] = []
    for batch in session.batches():
        rates.append(first * (last / first) ** (len(rates) / (steps - 1)))
        session.set_learning_rate(rates[-1])
        losses.append(float(session.step(batch)))
        if has_diverged(losses):
            break
    return {
        "rates": rates,
        "losses": losses,
        "global_batch_size": session.plan.global_batch_size,
    }


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the last loss is not finite, or smoothed lies far above the least; losses may be negative."""
    smoothed = smoothed_losses(losses)
    least = min(smoothed)
    return not math.isfinite(losses[-1]) or smoothed[-1] - least > (_DIVERGED - 1) * abs(least)


def smoothed_losses(losses: Sequence[float]) -> list[float]:
    """Exponential moving means, each divided by the sum of its weights."""
    mean, means = 0.0, []
    for count, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        means.append(mean / (1 - _SMOOTHING**count))
    return means


def steepest_rate(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Rate at which the smoothed loss falls fastest over the logarithm of the rate."""
    count = len(rates)
    window = max(1, count // _WINDOW)
    slopes = {
        step: smoothed[step + window] - smoothed[step - window]
        for step in range(max(window, count // _SKIPPED), count - window)
        if math.isfinite(smoothed[step + window])
    }
    step = min(slopes, key=slopes.__getitem__, default=None)
    return None if step is None or slopes[step] >= 0 else rates[step]
