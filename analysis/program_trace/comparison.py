"""The comparison of the traces of two programs: whether they train alike, where they part, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import Difference, common_steps, first_case, offset_of
from isotrain.analysis.program_trace.causes import likely_causes
from isotrain.analysis.program_trace.reading import GlobalStep, ProgramTrace
from isotrain.core.errors import IsotrainError


@dataclass(frozen=True)
class TraceComparison:
    """Whether two programs train alike.

    Attributes:
        reference: Folder of the reference's trace.
        run: Folder of the other trace.
        steps: Number of steps that both have, over all optimizers.
        offset: Step of the reference at which the run begins.
        differences: What differs in the first step and stage that does; empty if the traces agree.
        causes: Likely causes, the likeliest first.
        notes: What could not be compared.
        losses: Mean losses of the reference and of the run, by compared step.
    """

    reference: str
    run: str
    steps: int
    offset: int
    differences: Sequence[Difference]
    causes: Sequence[Cause]
    notes: Sequence[str]
    losses: Sequence[tuple[float, float]]

    @property
    def agree(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return not self.differences


def compare(reference: ProgramTrace, run: ProgramTrace) -> TraceComparison:
    """Compares two traces: the first is the reference.

    Raises:
        IsotrainError: They have no step, or no name of a parameter, in common.
    """
    offset = offset_of(reference, run)
    steps = list(common_steps(reference, run, offset))
    if not steps:
        raise IsotrainError(
            f"{run.folder} goes on from step {offset} of {reference.folder}, which has no further step:"
            " record more of it with --steps."
            if offset
            else f"{run.folder} and {reference.folder} have no step in common."
        )
    named, of_run = (set(step.first.weight) for step in steps[0])
    if not named & of_run:
        shown = [", ".join(sorted(names)[:3]) for names in (named, of_run)]
        raise IsotrainError(
            f"no parameter has the same name in both traces: {shown[0]}, ... in {reference.folder};"
            f" {shown[1]}, ... in {run.folder}. Compare programs that name the layers of their model alike."
        )
    case = first_case(reference, run, steps, offset)
    return TraceComparison(
        reference=str(reference.folder),
        run=str(run.folder),
        steps=len(steps),
        offset=offset,
        differences=[] if case is None else case.differences,
        causes=[] if case is None else likely_causes(case),
        notes=_notes(steps),
        losses=[(_mean(one.losses), _mean(other.losses)) for one, other in steps],
    )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def _notes(steps: Sequence[tuple[GlobalStep, GlobalStep]]) -> list[str]:
    """Names that only one program has."""
    one, other = (set(step.first.weight) for step in steps[0])
    notes = []
    for alone, owner in ((one - other, "reference"), (other - one, "run")):
        if alone:
            shown = ", ".join(sorted(alone)[:5])
            notes.append(f"parameters of the {owner} alone, not compared: {shown}")
    return notes
