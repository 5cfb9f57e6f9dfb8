"""The HTML report of a parity check: whether runs part, where, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from isotrain.analysis.pages import curves, page
from isotrain.analysis.pages.canvas import DASHES, MARKERS, MUTED, SERIES_COLORS, SeriesStyle
from isotrain.analysis.pages.curves import Line, Panel
from isotrain.analysis.pages.plot import Plot, listed
from isotrain.analysis.pages.units import power
from isotrain.analysis.parity import text
from isotrain.analysis.parity.records import PARITY_FILE, ParityRecord, RunRecord, Stage, StepRecord
from isotrain.core.json_records import read_json, record

_FLOOR = "noise floor"
_FLOOR_LOOK = SeriesStyle(MUTED, "", (0, (6, 4)))
_DIFFERENCES = (
    "Above: of all tensors of a step, the largest ratio of the difference to the noise floor, which "
    "is what rounding explains. From 1 on, the runs part. Below: the relative difference of the "
    "losses. Where both are equal to the last digit there is no point."
)
_STAGES = (
    "The largest ratio of the difference to the noise floor by kind of tensor, in the order in which "
    "a step computes them: the first that passes 1 is where the runs part."
)


def render(parity: ParityRecord) -> str:
    """Renders the HTML page.

    Raises:
        IsotrainError: A package that the page needs is not installed.
    """
    others = [run for run in parity.runs if run.status != "reference"]
    plots = [_differences(parity, others), *_stages(others)] if parity.noise else []
    sections = [
        ("runs", "Where they part"),
        *((plot.name, plot.title) for plot in plots),
        *((("steps", "Steps"), ("noise", "Noise floor")) if parity.noise else ()),
        ("machine", "Machine and versions"),
        ("spec", "Spec"),
    ]
    facts = {
        "kind": "Parity check",
        "name": parity.name,
        "source": PARITY_FILE,
        "created": page.moment(parity.created),
        "machine_line": page.machine_line(parity.machine),
        "heading": parity.summary,
        "reference": parity.reference,
        "traced": _steps(parity.steps),
        "sections": sections,
        "runs": [_run(run) for run in others],
        "columns": text.COLUMNS,
        "rows": list(text.rows(parity)),
        "noise": list(text.noise(parity)),
        "machine": page.facts({**parity.machine, **parity.versions}),
        "spec": page.spec_text(parity.spec),
    }
    return page.render("parity.html.jinja", plots, facts)


def read_parity(path: Path) -> ParityRecord:
    """Reads a parity check from its folder, or from the JSON file itself.

    Raises:
        IsotrainError: The file is no parity check of this version.
    """
    file = path / PARITY_FILE if path.is_dir() else path
    fields = read_json(file)
    if isinstance(fields, dict):
        fields.pop("format", None)
    return record(ParityRecord, fields, str(file))


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def _run(run: RunRecord) -> dict[str, Any]:
    """The template's variables of a run: its verdict, first divergence and causes."""
    causes = [(cause.title, list(text.facts_of_cause(cause))) for cause in run.causes]
    explained = run.first is not None or run.notes or run.status == "failed"
    return {
        "name": run.name,
        "status": run.status,
        "reason": run.reason,
        "facts": text.facts_of(run) if explained else [],
        "causes": causes,
    }


def _differences(parity: ParityRecord, runs: Sequence[RunRecord]) -> Plot:
    drawn = [run for run in runs if run.steps]
    title = "Differences by step"
    if not drawn:
        return Plot("differences", title, "", "No run has traced steps.")
    looks = {run.name: _look(index) for index, run in enumerate(drawn)}
    steps = parity.steps
    excess = [
        _line(run.name, run.steps, [_excess(s) for s in run.steps], looks[run.name])
        for run in drawn
    ]
    losses = [
        _line(run.name, run.steps, [s.loss_difference or 0.0 for s in run.steps], looks[run.name])
        for run in drawn
    ]
    floors = [step.loss_floor for step in parity.runs[0].steps]
    ones = Line(_FLOOR, steps, [1.0] * len(steps), _FLOOR_LOOK)
    equal = "equal to the last digit at every step"
    panels = [
        Panel("largest difference / noise floor", [ones, *excess], logarithmic=True, empty=equal),
        Panel(
            "difference of the losses",
            [Line(_FLOOR, steps, floors, _FLOOR_LOOK), *losses],
            logarithmic=True,
            empty=equal,
        ),
    ]
    rows = tuple(
        (run.name, str(step.step), _ratio(_excess(step)), power(step.loss_difference or 0.0))
        for run in drawn
        for step in run.steps
    )
    largest = [f"{run.name} {_ratio(max(map(_excess, run.steps)))}" for run in drawn]
    return Plot(
        "differences",
        title,
        _DIFFERENCES,
        f"Largest ratio of a difference to its noise floor: {listed(largest)}.",
        ("run", "step", "difference / floor", "difference of the loss"),
        rows,
        partial(curves.draw, panels, "step"),
    )


def _stages(runs: Sequence[RunRecord]) -> Sequence[Plot]:
    """A plot of each kind of tensor for the first run that parts from the reference."""
    parting = next((run for run in runs if run.status == "difference" and run.steps), None)
    if parting is None:
        return []
    kinds: list[Stage] = [stage for stage in text.STAGE_NAMES if stage in parting.steps[0].excess]
    lines = [
        _line(
            text.STAGE_NAMES[stage],
            parting.steps,
            [step.excess.get(stage, 0.0) for step in parting.steps],
            _look(index),
        )
        for index, stage in enumerate(kinds)
    ]
    xs = [step.step for step in parting.steps]
    ones = Line(_FLOOR, xs, [1.0] * len(xs), _FLOOR_LOOK)
    rows = tuple(
        (str(step.step), *(_ratio(step.excess.get(stage, 0.0)) for stage in kinds))
        for step in parting.steps
    )
    columns = tuple(text.STAGE_NAMES[stage] for stage in kinds)
    first = [f"{name} {ratio}" for name, ratio in zip(columns, rows[0][1:], strict=True)]
    return [
        Plot(
            "stages",
            f"Kinds of tensors of {parting.name}",
            _STAGES,
            f"Ratios to the noise floor in the first traced step: {listed(first)}.",
            ("step", *columns),
            rows,
            partial(
                curves.draw,
                [Panel("largest difference / noise floor", [ones, *lines], logarithmic=True)],
                "step",
            ),
        )
    ]


def _line(
    label: str, steps: Sequence[StepRecord], values: Sequence[float], look: SeriesStyle
) -> Line:
    return Line(label, [step.step for step in steps], values, look)


def _excess(step: StepRecord) -> float:
    """The largest ratio of a difference to its noise floor in a step; infinite without a floor."""
    return max(step.excess.values(), default=0.0)


def _ratio(value: float) -> str:
    return "no floor" if math.isinf(value) else f"{value:.2g}"


def _look(index: int) -> SeriesStyle:
    return SeriesStyle(
        SERIES_COLORS[index % len(SERIES_COLORS)],
        MARKERS[index % len(MARKERS)],
        DASHES[index % len(DASHES)],
    )
