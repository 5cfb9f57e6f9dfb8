"""All plots of a comparison, each with title, caption, summary, table and drawing function."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from isotrain.analysis.compare.plots import dot_plots
from isotrain.analysis.compare.plots.curves import differences, draw_scaling, loss_panels
from isotrain.analysis.compare.plots.series import Series, finished, is_finite, series_of, styles_of
from isotrain.analysis.compare.records import Cell, ComparisonRecord, Estimate
from isotrain.analysis.pages import curves, timeline
from isotrain.analysis.pages.canvas import INK, MARKERS, SeriesStyle
from isotrain.analysis.pages.plot import Plot, listed
from isotrain.analysis.pages.units import Unit, power, unit_of
from isotrain.core.quantities import counted

_THROUGHPUT = (
    "Samples per second in the steady state: the mark is the estimate, the line its 95 % bootstrap "
    "interval. The band is the interval of the fastest cell; a cell whose interval reaches into it "
    "cannot be told from the fastest."
)
_SCALING = (
    "Throughput relative to one replica of the same backend, with 95 % intervals. The dashed line "
    "without marks is the ideal: twice the replicas, twice the throughput. Marks of the same number "
    "of replicas stand a little apart, so that none hides another."
)
_LOSS = (
    "Above: the mean loss of every global batch; lines that lie beneath others are drawn wider, so "
    "that all of them show. "
)
_DIFFERENCE = (
    "Below: the difference to {}, relative to the larger of the two losses. Steps where the two are "
    "equal to the last digit have no point there."
)
_NO_DIFFERENCE = "The reference cell has no losses, so there are no differences to draw."
_THINNED = (
    " One of {} steps is drawn; of the differences it is the largest, so no deviation is left out."
)
_STEP_TIMES = (
    "Every dot is the mean step of one timed block, of all repeats; the box holds the middle half of "
    "them, the thick line is the median, written on the right. Blocks are timed and not single "
    "steps, so a single slow step shows weakened. Of very many blocks some are left out, evenly."
)
_TIMELINE = (
    "What every process does in one step, from left to right: of some that were taken one by one, the "
    "step whose length is nearest to the median of the table. What happens at the same time "
    "in one process is drawn one below the other."
)
_MEMORY = (
    "Resident memory at its highest, with 95 % intervals: filled marks are the largest process, "
    "hollow ones all processes of the cell together, written on the right. Pages that processes "
    "share count once for each."
)


def plots_of(comparison: ComparisonRecord) -> list[Plot]:
    """All plots, in the order of the report."""
    cells = finished(comparison.cells)
    makers: tuple[Callable[[ComparisonRecord, list[Cell]], Plot], ...] = (
        *(_throughput, _scaling, _losses),
        *(_step_times, _timeline, _memory),
    )
    return [make(comparison, cells) for make in makers]


def _nothing(name: str, title: str, why: str) -> Plot:
    return Plot(name, title, "", why)


def interval(unit: Unit, estimate: Estimate) -> str:
    """The interval in words."""
    return f"{unit.text(estimate.low)} to {unit.text(estimate.high)}"


def _estimate_text(unit: Unit, name: str, estimate: Estimate) -> str:
    return f"{name} {unit.full(estimate.value)} ({interval(unit, estimate)})"


def _values(estimates: Sequence[Estimate]) -> list[float]:
    return [estimate.value for estimate in estimates]


def _throughput(comparison: ComparisonRecord, cells: list[Cell]) -> Plot:
    title = "Throughput"
    rates = {c.name: rate for c in cells if (rate := c.samples_per_s) and is_finite(rate)}
    if not rates:
        return _nothing("throughput", title, "No cell has a throughput to draw.")
    ranked = sorted(rates, key=lambda name: -rates[name].value)
    unit, looks = unit_of("rate", _values(list(rates.values()))), styles_of(cells)
    drawn = [
        dot_plots.Row(name, looks[name], unit.text(rates[name].value), marks=((rates[name], True),))
        for name in ranked
    ]
    left_out = len(comparison.cells) - len(drawn)
    caption = _THROUGHPUT
    if left_out:
        caption += f" Without a throughput, and so not drawn: {_counted(left_out, 'cell')}."
    descriptions = [_estimate_text(unit, name, rates[name]) for name in ranked]
    return Plot(
        "throughput",
        title,
        caption,
        f"Throughput with 95 % intervals, highest first: {listed(descriptions)}.",
        ("cell", "samples/s", "95 % interval"),
        tuple((n, unit.text(rates[n].value), interval(unit, rates[n])) for n in ranked),
        partial(dot_plots.draw_marks, drawn, unit, "samples per second", rates[ranked[0]]),
    )


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _scaling(_: ComparisonRecord, cells: list[Cell]) -> Plot:
    title = "Scaling"
    able = [c for c in cells if is_finite(c.speedup)]
    drawn = [s for s in series_of(able) if any(c.replicas > 1 for c in s.cells)]
    if not drawn:
        why = (
            "A scaling curve takes one cell with one replica and another with more; there is none."
        )
        return _nothing("scaling", title, why)
    unit, percent = unit_of("plain", [1.0]), unit_of("percent", [1.0])
    table = []
    for series in drawn:
        for cell in series.cells:
            if cell.speedup is not None:
                speedup = cell.speedup
                share = percent.full(speedup.value / cell.replicas)
                figures = (unit.text(speedup.value), interval(unit, speedup), share)
                table.append((series.label, str(cell.replicas), *figures))
    return Plot(
        "scaling",
        title,
        _SCALING,
        f"Speedup over one replica: {listed([_describe_scaling(series, unit) for series in drawn])}.",
        ("series", "replicas", "speedup", "95 % interval", "of the ideal"),
        tuple(table),
        partial(draw_scaling, drawn),
    )


def _describe_scaling(series: Series, unit: Unit) -> str:
    points = [
        f"{unit.text(cell.speedup.value)} with {cell.replicas}"
        for cell in series.cells
        if cell.speedup is not None and cell.replicas > 1
    ]
    return f"{series.label} {', '.join(points)}"


def _losses(comparison: ComparisonRecord, cells: list[Cell]) -> Plot:
    title = "Loss"
    able = [cell for cell in cells if any(map(math.isfinite, cell.losses))]
    if not able:
        return _nothing("loss", title, "No cell has losses to draw.")
    reference = next((cell for cell in able if cell.name == comparison.reference), None)
    steps = max(len(cell.losses) for cell in able)
    table = []
    for cell in able:
        apart = differences(cell, reference) if reference else []
        finite = [difference for difference in apart if math.isfinite(difference)]
        largest = power(max(finite)) if finite else "–"
        if reference is cell:
            largest = "reference"
        table.append((cell.name, str(len(cell.losses)), f"{_last(cell.losses):.6g}", largest))
    descriptions = [
        f"{name} ends at {last}, largest difference {apart}" for name, _, last, apart in table
    ]
    caption = _LOSS + (_DIFFERENCE.format(reference.name) if reference else _NO_DIFFERENCE)
    if steps > curves.MAX_POINTS:
        caption += _THINNED.format(curves.stride(steps))
    return Plot(
        "loss",
        "Loss, and difference to the reference" if reference else title,
        caption,
        f"Loss curves over {counted(steps, 'step')}: {listed(descriptions)}.",
        ("cell", "steps", "last loss", "largest relative difference"),
        tuple(table),
        partial(curves.draw, loss_panels(able, reference, styles_of(cells)), "step"),
    )


def _last(losses: Sequence[float]) -> float:
    return [loss for loss in losses if math.isfinite(loss)][-1]


def _step_times(_: ComparisonRecord, cells: list[Cell]) -> Plot:
    title = "Step times"
    times = {cell.name: block_times(cell) for cell in cells}
    able = {name: seconds for name, seconds in times.items() if seconds}
    if not able:
        return _nothing("step-times", title, "No cell has timed blocks to draw.")
    unit = unit_of("seconds", [statistics.median(seconds) for seconds in able.values()])
    looks = styles_of(cells)
    table, drawn = [], []
    for name, seconds in able.items():
        five = dot_plots.quartiles(seconds)
        table.append((name, str(len(seconds)), *(unit.text(value) for value in five)))
        text = unit.text(five[2])
        drawn.append(dot_plots.Row(name, looks[name], text, times=tuple(seconds)))
    descriptions = [f"{r[0]} median {r[4]}, from {r[2]} to {r[6]} {unit.name}" for r in table]
    return Plot(
        "step-times",
        title,
        _STEP_TIMES,
        f"Time of a step over the timed blocks: {listed(descriptions)}.",
        (
            "cell",
            "blocks",
            *(f"{w}, {unit.name}" for w in ("least", "25 %", "median", "75 %", "most")),
        ),
        tuple(table),
        partial(dot_plots.draw_times, drawn, unit),
    )


def block_times(cell: Cell) -> list[float]:
    """Mean seconds of a step in each timed block of all repeats."""
    return [
        seconds / repeat.block_steps
        for repeat in cell.repeats
        for seconds in repeat.block_seconds
        if repeat.block_steps > 0 and math.isfinite(seconds)
    ]


def _timeline(_: ComparisonRecord, cells: list[Cell]) -> Plot:
    title = "Time line of a step"
    able = [cell for cell in cells if cell.timeline]
    if not able:
        return _nothing("timeline", title, "No cell has a time line.")
    unit = unit_of("seconds", [timeline.length(cell.timeline) for cell in able])
    table, descriptions = [], []
    for cell in able:
        shares = timeline.seconds_by_name(cell.timeline)
        table += [
            (
                cell.name,
                name,
                unit.text(seconds),
                f"{100 * seconds / timeline.length(cell.timeline):.0f} %",
            )
            for name, seconds in shares.items()
        ]
        parts = ", ".join(f"{name} {unit.full(seconds)}" for name, seconds in shares.items())
        descriptions.append(f"{cell.name}: {parts}")
    return Plot(
        "timeline",
        title,
        _TIMELINE,
        f"Means over the processes of a step: {listed(descriptions)}.",
        ("cell", "what", f"time per step, {unit.name}", "share of the step"),
        tuple(table),
        partial(
            timeline.draw,
            {cell.name: cell.timeline for cell in able},
            unit,
            "the start of the step",
        ),
    )


def _memory(_: ComparisonRecord, cells: list[Cell]) -> Plot:
    title = "Memory"
    able = [c for c in cells if is_finite(c.peak_memory_bytes) or is_finite(c.total_memory_bytes)]
    if not able:
        return _nothing("memory", title, "No cell has a peak of memory to draw.")
    estimates = [e for c in able for e in (c.peak_memory_bytes, c.total_memory_bytes) if e]
    unit = unit_of("bytes", _values(estimates))
    looks = styles_of(cells)
    table, drawn = [], []
    for cell in able:
        both = cell.peak_memory_bytes, cell.total_memory_bytes
        shown = [unit.text(e.value) if e else "–" for e in both]
        table.append((cell.name, *shown))
        marks = tuple((e, filled) for e, filled in zip(both, (True, False), strict=True) if e)
        drawn.append(dot_plots.Row(cell.name, looks[cell.name], shown[1], marks=marks))
    legend = (
        (SeriesStyle(INK, MARKERS[0]), True, "largest process"),
        (SeriesStyle(INK, MARKERS[0]), False, "all processes"),
    )
    descriptions = [
        f"{name} {one} in the largest process, {total} in all" for name, one, total in table
    ]
    return Plot(
        "memory",
        title,
        _MEMORY,
        f"Peak memory in {unit.name}: {listed(descriptions)}.",
        ("cell", f"largest process, {unit.name}", f"all processes, {unit.name}"),
        tuple(table),
        partial(
            dot_plots.draw_marks, drawn, unit, f"peak memory, {unit.name}", None, legend=legend
        ),
    )
