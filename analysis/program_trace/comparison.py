"""The comparison of the traces of two programs: whether they train alike, where they part, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import (
    Difference,
    common_steps,
    evaluated_rows,
    first_case,
    offset_of,
)
from isotrain.analysis.program_trace.causes.likely import likely_causes
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


def compare(
    reference: ProgramTrace, run: ProgramTrace, *, steps: int | None = None
) -> TraceComparison:
    """Compares two traces: the first is the reference.

    Args:
        reference: Trace of the reference.
        run: The other trace.
        steps: Number of steps of each optimizer to compare; None: all that both have.

    Raises:
        PlanError: One of them has fewer than `steps` steps.
        IsotrainError: They have no step in common; or nothing differs, and no weight could be compared.
    """
    run = aligned(reference, run)
    offset = offset_of(reference, run)
    reference.require_steps(0 if steps is None else offset + steps)
    run.require_steps(steps or 0)
    pairs = [
        pair
        for pair in common_steps(reference, run, offset)
        if steps is None or pair[1].index < steps
    ]
    if not pairs:
        raise IsotrainError(
            f"{run.folder} goes on from step {offset} of {reference.folder}, which has no further step:"
            " record more of it with --steps."
            if offset
            else f"{run.folder} and {reference.folder} have no step in common."
        )
    case = first_case(reference, run, pairs, offset)
    if case is None:
        _require_common_weights(reference, run, pairs)
    notes = [*reference.notes, *run.notes, *_notes(reference, run, pairs)]
    if steps is None and not offset:
        notes += _steps_alone(reference, run, pairs)
    return TraceComparison(
        reference=str(reference.folder),
        run=str(run.folder),
        steps=len(pairs),
        offset=offset,
        differences=[] if case is None else case.differences,
        causes=[] if case is None else likely_causes(case),
        notes=notes,
        losses=[(one.mean_loss, other.mean_loss) for one, other in pairs],
    )


def _require_common_weights(
    reference: ProgramTrace, run: ProgramTrace, pairs: Sequence[tuple[GlobalStep, GlobalStep]]
) -> None:
    """Refuses to say that traces agree of which no weight is compared.

    Raises:
        IsotrainError: No weight is in both.
    """
    if any(set(one.first.weight) & set(other.first.weight) for one, other in pairs):
        return
    for trace in (reference, run):
        if trace.sharded:
            raise IsotrainError(
                f"{trace.folder}: its weights are sharded over processes, and not recorded. Samples and"
                " options of the optimizer agree, and nothing else can be compared. Trace the program with"
                " DistributedDataParallel."
            )
    raise IsotrainError(
        f"{run.folder} and {reference.folder} have no weight in common, so nothing says whether they train"
        f" alike. The one trains {_described_weights(run)}; the other one trains"
        f" {_described_weights(reference)}. Both must train the same model."
    )


def _described_weights(trace: ProgramTrace) -> str:
    shapes = {name: shape for step in trace.steps for name, shape in step.first.shapes.items()}
    names = {name for step in trace.steps for name in step.first.weight}
    return first_of([f"{name} {list(shapes.get(name, ()))}" for name in sorted(names)], 5) or "none"


def _notes(
    reference: ProgramTrace, run: ProgramTrace, pairs: Sequence[tuple[GlobalStep, GlobalStep]]
) -> Iterator[str]:
    """Notes on what is not compared, as only one program has it or records it."""
    traces = {"reference": reference, "run": run}
    sides = dict(zip(traces, zip(*pairs, strict=True), strict=True))
    recorded = [owner for owner, steps in sides.items() if any(step.rows() for step in steps)]
    for owner in traces:
        if owner not in recorded:
            yield f"samples of the {owner} are not recorded, and not compared"
    evaluated = dict(zip(traces, evaluated_rows(reference, run, pairs), strict=True))
    if any(evaluated.values()):
        for owner in (owner for owner, rows in evaluated.items() if not rows):
            yield f"evaluations are not compared: the {owner} has none in these steps"
    weights = {owner: _names(steps, "weight") for owner, steps in sides.items()}
    slots = [_names(steps, "optimizer_state") for steps in sides.values()]
    if all(slots) and not slots[0] & slots[1]:
        yield "the optimizer state of the programs has no names in common, and is not compared"
    unrecorded = {*reference.sharded, *run.sharded}
    alone = {
        "reference": weights["reference"] - weights["run"] - unrecorded,
        "run": weights["run"] - weights["reference"] - unrecorded,
    }
    sharded = {owner: trace.sharded for owner, trace in traces.items()}
    for what, by_owner in (("alone", alone), ("sharded over processes", sharded)):
        for owner, names in by_owner.items():
            if names:
                yield f"parameters of the {owner} {what}, not compared: {first_of(sorted(names), 5)}"


def _names(steps: Iterable[GlobalStep], kind: str) -> set[str]:
    return {name for step in steps for name in getattr(step.first, kind)}


def _steps_alone(
    reference: ProgramTrace, run: ProgramTrace, pairs: Sequence[tuple[GlobalStep, GlobalStep]]
) -> list[str]:
    """Notes on steps that only one program has."""
    return [
        f"steps of the {owner} alone, not compared: {len(trace.steps) - len(pairs)}"
        for owner, trace in (("reference", reference), ("run", run))
        if len(trace.steps) > len(pairs)
    ]
