"""A parity check as terminal text: the verdict, then where runs diverge, why, and what to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from isotrain.analysis.parity.records import (
    STAGES,
    Cause,
    Divergence,
    ParityRecord,
    RunRecord,
    Stage,
    StepRecord,
)
from isotrain.core.errors import first_of
from isotrain.core.quantities import counted
from isotrain.core.reporting import tables

HEADLINES = {"agree": "AGREE", "difference": "DIFFERENCE", "failed": "FAILED"}
_TENSORS_SHOWN = 5


def result(record: ParityRecord) -> str:
    """The whole text that `isotrain parity` prints."""
    parts = [tables.paragraph(f"{HEADLINES[record.verdict]}: {record.summary}")]
    for run in record.runs:
        if run.status != "reference":
            parts += _run(run)
    if record.noise:
        parts += _steps(record)
        parts.append(tables.facts("Noise floor: the reference against itself", noise(record)))
    return "\n".join(parts)


def _steps(record: ParityRecord) -> Iterator[str]:
    """A table of the steps for each run: narrow, as the run is in its heading."""
    for name, lines in itertools.groupby(rows(record), key=lambda row: row[0]):
        yield tables.paragraph(f"{name}, step by step:") + tables.table(
            COLUMNS[1:], [row[1:] for row in lines]
        )


def _run(run: RunRecord) -> Iterator[str]:
    yield tables.facts(f"{run.name}: {run.status}", facts_of(run))
    for cause in run.causes:
        yield tables.facts(f"Likely cause: {cause.title}", facts_of_cause(cause))


def facts_of(run: RunRecord) -> list[tuple[str, str]]:
    """The rows of a run: first divergence, confirmation in float64, notes."""
    if run.first is None:
        rows = [("why", run.reason)]
    else:
        rows = [
            ("first step", str(run.first.step)),
            ("first tensor", f"{run.first.name}, {STAGES[run.first.stage]}"),
            ("difference", _measure(run.first)),
        ]
        others = [divergence.name for divergence in run.divergences if divergence != run.first]
        if others:
            rows.append(("also there", first_of(others, _TENSORS_SHOWN)))
    if run.confirmed is not None:
        rows.append(("in float64", f"{run.confirmed:.2g} is left of the difference"))
    return rows + [("note", note) for note in run.notes]


def _measure(first: Divergence) -> str:
    """The difference of a tensor: the bits, or the noise floor, with it."""
    if first.bits is None:
        return measure(first.difference, first.floor)
    return f"{counted(first.bits, 'bit')}; {first.difference:.2g} relative"


def measure(difference: float, floor: float) -> str:
    """A relative difference and its noise floor as text."""
    return f"{difference:.2g} relative; rounding explains {floor:.2g}"


def facts_of_cause(cause: Cause) -> Iterator[tuple[str, str]]:
    """The rows of a cause: its evidence, and what to do."""
    yield from (("because", line) for line in cause.evidence)
    yield "what to do", cause.advice


COLUMNS = ("run", "step", "samples", "loss", "reference", "differs by", "floor", "beyond it")


def rows(record: ParityRecord) -> Iterator[list[str]]:
    """A row per run and step: its loss, the reference's, and the stages that diverge."""
    reference, *others = record.runs
    for run in others:
        for step, other in zip(run.steps, reference.steps, strict=False):
            yield [run.name, str(step.step), str(step.samples), *_losses(step, other), _apart(step)]


def _losses(step: StepRecord, other: StepRecord) -> list[str]:
    numbers = [f"{step.loss_difference:.1g}", f"{step.loss_floor:.1g}"]
    return [f"{step.loss:.8g}", f"{other.loss:.8g}", *numbers]


def _apart(step: StepRecord) -> str:
    """The stages with a tensor beyond the noise floor."""
    return stages([stage for stage, ratio in step.excess.items() if ratio > 1]) or "nothing"


def stages(names: list[str]) -> str:
    """Stage names as text, separated by commas."""
    return ", ".join(STAGE_NAMES[name] for name in names)  # type: ignore[index]


STAGE_NAMES: dict[Stage, str] = {
    "gradient": "gradient",
    "reduced": "reduced gradient",
    "weight": "weight",
    "optimizer": "optimizer state",
    "state": "state",
    "loss": "loss",
}


def noise(record: ParityRecord) -> Iterator[tuple[str, str]]:
    """The rows of the reruns from which the noise floor is estimated."""
    for source in record.noise:
        if source.failed is not None:
            yield f"with {source.about}", f"failed: {source.failed}"
            continue
        largest = [f"{STAGE_NAMES[s]} {source.largest[s]:.1g}" for s in STAGES]
        yield f"with {source.about}", "largest difference: " + ", ".join(largest)
