"""The comparison of the traces of two programs: whether they train alike, where they part, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import Difference, common_steps, first_case, offset_of
from isotrain.analysis.program_trace.causes import likely_causes
from isotrain.analysis.program_trace.names import aligned
from isotrain.analysis.program_trace.reading import GlobalStep, ProgramTrace
from isotrain.core.errors import IsotrainError, first_of


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
        IsotrainError: They have no step in common; or nothing differs, and all weights are sharded.
    """
    run = aligned(reference, run)
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
    sharded = [trace for trace in (reference, run) if trace.sharded]
    case = first_case(reference, run, steps, offset)
    if case is None and sharded and not named & of_run:
        raise IsotrainError(
            f"{sharded[0].folder}: its weights are sharded over processes, and not recorded. Samples and"
            " options of the optimizer agree, and nothing else can be compared. Trace the program with"
            " DistributedDataParallel."
        )
    return TraceComparison(
        reference=str(reference.folder),
        run=str(run.folder),
        steps=len(steps),
        offset=offset,
        differences=[] if case is None else case.differences,
        causes=[] if case is None else likely_causes(case),
        notes=[
            *(*reference.notes, *run.notes),
            *_notes(steps, {"reference": reference.sharded, "run": run.sharded}),
        ],
        losses=[(one.mean_loss, other.mean_loss) for one, other in steps],
    )


def _notes(
    steps: Sequence[tuple[GlobalStep, GlobalStep]], sharded: Mapping[str, Sequence[str]]
) -> list[str]:
    """Parameters that are not compared, as only one program has them or records them."""
    one, other = (set(step.first.weight) for step in steps[0])
    unrecorded = {name for names in sharded.values() for name in names}
    alone = {"reference": one - other - unrecorded, "run": other - one - unrecorded}
    slots = [set(step.first.optimizer_state) for step in steps[0]]
    notes = (
        ["the optimizer state of the programs has no names in common, and is not compared"]
        if all(slots) and not slots[0] & slots[1]
        else []
    )
    return notes + [
        f"parameters of the {owner} {what}, not compared: {first_of(sorted(names), 5)}"
        for what, by_owner in (("alone", alone), ("sharded over processes", sharded))
        for owner, names in by_owner.items()
        if names
    ]
