"""The comparison of two traces as terminal text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from isotrain.analysis.parity.text import facts_of_cause, measure
from isotrain.analysis.program_trace.case import STAGES
from isotrain.analysis.program_trace.comparison import TraceComparison
from isotrain.core.errors import first_of
from isotrain.core.quantities import counted
from isotrain.core.reporting import tables

_SHOWN = 5


def result(comparison: TraceComparison) -> str:
    """The verdict, where the programs part and why, and their losses."""
    names = f"{comparison.run} and {comparison.reference}"
    if comparison.agree:
        headline = f"AGREE: {names} train alike in {counted(comparison.steps, 'step')}."
    else:
        headline = f"DIFFERENCE: {comparison.run} does not train like {comparison.reference}."
    parts = [tables.paragraph(headline), tables.facts(None, _facts(comparison))]
    for cause in comparison.causes:
        parts.append(tables.facts(f"Likely cause: {cause.title}", facts_of_cause(cause)))
    columns = ("step", "loss", "reference", "difference")
    parts.append(tables.table(columns, _losses(comparison)))
    return "\n".join(parts)


def _facts(comparison: TraceComparison) -> Iterator[tuple[str, str]]:
    if comparison.offset:
        yield "goes on", f"from step {comparison.offset} of {comparison.reference}"
    if comparison.differences:
        first, *others = comparison.differences
        yield "first step", str(first.step)
        named = f"{first.name}, {STAGES[first.stage]}" if first.name else STAGES[first.stage]
        yield "first difference", named
        if math.isfinite(first.difference):
            yield "difference", measure(first.difference, first.floor)
        if others:
            yield "also there", first_of([other.name for other in others], _SHOWN)
    yield from (("note", note) for note in comparison.notes)


def _losses(comparison: TraceComparison) -> Iterator[list[str]]:
    for step, (reference, run) in enumerate(comparison.losses):
        scale = max(abs(reference), abs(run))
        apart = abs(run - reference) / scale if scale else 0.0
        yield [str(step), f"{run:.8g}", f"{reference:.8g}", f"{apart:.1g}"]
