"""Causes of other updates, optimizer state and buffers."""

from __future__ import annotations

import itertools

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import Case, updates
from isotrain.analysis.program_trace.causes.evidence import (
    FITS,
    both,
    listed,
    parting_names,
    ratio_of,
)

_AVERAGED = "averaged."
"""Prefix of the averages of weights among the buffers."""


def not_in_optimizer(case: Case) -> Cause | None:
    """The optimizer lacks weights that the reference trains."""
    missing = set(case.reference_step.first.weight) - set(case.run_step.first.weight)
    untrained = [s.first.untrained for s in case.run.steps if s.index == 0]
    missing &= set(itertools.chain.from_iterable(untrained))
    if not missing:
        return None
    return Cause(
        "not-in-optimizer",
        "parameters of the model are not in the optimizer",
        [f"the reference trains {listed(missing)}, and the run's optimizer does not have them"],
        "make the optimizer after the model is complete, with all of its parameters.",
    )


def optimizer_state_lost(case: Case) -> Cause | None:
    """A resumed run begins with a new optimizer state."""
    ours, theirs = (step.first.optimizer_state for step in both(case))
    steps = [name for name in theirs if name.endswith("/step") and name in ours]
    counts = {(*ours[name].sample, *theirs[name].sample) for name in steps}
    if not case.offset or (steps and all(a == b for a, b in counts)):
        return None
    shown = ", ".join(f"{b:g}, and {a:g} in the reference" for a, b in sorted(counts)[:1])
    return Cause(
        "optimizer-state-lost",
        "the run goes on without the optimizer's state",
        [
            f"its first weights are those after step {case.offset - 1} of the reference",
            *([f"the optimizer's count of steps is {shown}"] if shown else []),
        ],
        "save `optimizer.state_dict()`, and load it before the first step.",
    )


def statistics_part(case: Case) -> Cause | None:
    """Processes have buffers of their own."""
    first, *others = (rank.state for rank in case.run_step.ranks)
    parting = {name for other in others for name in parting_names(first, other)}
    if not parting:
        return None
    if all(name.startswith(_AVERAGED) for name in parting):
        return Cause(
            "average-not-synced",
            "each process has an average of weights of its own",
            [f"averages differ between the processes: {listed(parting)}"],
            "update the average once the processes have exchanged their weights.",
        )
    return Cause(
        "statistics-not-synced",
        "each process has moving statistics of its own",
        [f"buffers differ between the processes: {listed(parting)}"],
        "broadcast or average buffers, or use synchronised batch normalisation.",
    )


def update_scaled(case: Case) -> Cause | None:
    """Weights move a constant times as far."""
    reference, run = (updates(case.steps, case.index, side) for side in (0, 1))
    ratio, left = ratio_of(reference, run)
    if left > FITS or abs(ratio - 1) < FITS:
        return None
    return Cause(
        "update-scaled",
        f"updates are {ratio:.4g} times those of the reference",
        ["gradients and options agree, and all weights move by a constant factor"],
        "look for a rate that is applied elsewhere.",
    )
