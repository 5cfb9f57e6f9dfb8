"""A check of parity as text for people: the verdict first, then where, why and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from isotrain.analysis.parity.records import (
    STAGES,
    Cause,
    ParityRecord,
    RunRecord,
    Stage,
    StepRecord,
)
from isotrain.core.errors import first_of
from isotrain.core.reporting import tables

HEADLINES = {"agree": "AGREE", "difference": "DIFFERENCE", "failed": "FAILED"}
_TENSORS_SHOWN = 5


def result(found: ParityRecord) -> str:
    """Everything, as the command line prints it."""
    parts = [tables.paragraph(f"{HEADLINES[found.verdict]}: {found.summary}")]
    for run in found.runs:
        if run.status != "reference":
            parts += _run(run)
    parts.append(tables.table(COLUMNS, rows(found)))
    parts.append(tables.facts("Noise floor: the reference against itself", noise(found)))
    return "\n".join(parts)


def _run(run: RunRecord) -> Iterator[str]:
    yield tables.facts(f"{run.name}: {run.status}", facts_of(run))
    for cause in run.causes:
        yield tables.facts(f"Likely cause: {cause.title}", _cause(cause))


def facts_of(run: RunRecord) -> list[tuple[str, str]]:
    """What is said of a run."""
    if run.first is None:
        found = [("why", run.reason)]
    else:
        found = [
            ("first step", str(run.first.step)),
            ("first tensor", f"{run.first.name}, {STAGES[run.first.stage]}"),
            ("difference", measure(run.first.difference, run.first.floor)),
        ]
        others = [divergence.name for divergence in run.divergences if divergence != run.first]
        if others:
            found.append(("also there", first_of(others, _TENSORS_SHOWN)))
    if run.confirmed is not None:
        found.append(("in float64", f"{run.confirmed:.2g} is left of the difference"))
    return found + [("note", note) for note in run.notes]


def measure(difference: float, floor: float) -> str:
    """A relative difference beside its floor."""
    return f"{difference:.2g} relative; rounding explains {floor:.2g}"


def _cause(cause: Cause) -> Iterator[tuple[str, str]]:
    yield from (("because", line) for line in cause.evidence)
    yield "what to do", cause.advice


COLUMNS = ("run", "step", "samples", "loss", "reference", "difference", "floor", "beyond it")


def rows(found: ParityRecord) -> Iterator[list[str]]:
    """A row per run and step: the loss beside the reference's, and which tensors part."""
    reference, *others = found.runs
    for run in others:
        for step, other in zip(run.steps, reference.steps, strict=False):
            yield [run.name, str(step.step), str(step.samples), *_losses(step, other), _apart(step)]


def _losses(step: StepRecord, other: StepRecord) -> list[str]:
    numbers = [f"{step.loss_difference:.1g}", f"{step.loss_floor:.1g}"]
    return [f"{step.loss:.8g}", f"{other.loss:.8g}", *numbers]


def _apart(step: StepRecord) -> str:
    """The stages with a tensor beyond the floor."""
    return stages([stage for stage, ratio in step.excess.items() if ratio > 1]) or "nothing"


def stages(names: list[str]) -> str:
    """The words for stages."""
    return ", ".join(_WORDS[name] for name in names)  # type: ignore[index]


_WORDS: dict[Stage, str] = {
    "gradient": "gradient",
    "reduced": "reduced gradient",
    "weight": "weight",
    "slot": "slot",
    "state": "state",
    "loss": "loss",
}


def noise(found: ParityRecord) -> Iterator[tuple[str, str]]:
    """What the noise floor rests on."""
    for source in found.noise:
        if source.failed is not None:
            yield f"with {source.about}", f"failed: {source.failed}"
            continue
        largest = [f"{_WORDS[s]} {source.largest[s]:.1g}" for s in STAGES]
        yield f"with {source.about}", "largest difference: " + ", ".join(largest)
