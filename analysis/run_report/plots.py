"""All plots of a run: losses, metrics, what was logged, throughput and the time line of its processes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from isotrain.analysis.pages import curves, timeline
from isotrain.analysis.pages.canvas import MUTED, SERIES_COLORS, SeriesStyle
from isotrain.analysis.pages.curves import Line, Panel
from isotrain.analysis.pages.plot import Plot, listed
from isotrain.analysis.pages.units import unit_of
from isotrain.analysis.run_report.run_files import RunFiles
from isotrain.core.quantities import counted
from isotrain.core.reporting.tables import number

_EACH_STEP = SeriesStyle(MUTED, "", "-")
_PARTS = {
    "training": SeriesStyle(SERIES_COLORS[0], "o", "-"),
    "validation": SeriesStyle(SERIES_COLORS[1], "s", (0, (5, 2))),
}
_RATE = "learning rate"
_MAX_PANELS = 8
_MAX_TRACKS = 32
_LOSS = (
    "The mean loss of every global batch, the mean over each epoch, and that of each evaluation, "
    "over the steps done."
)
_THROUGHPUT = (
    "Samples per second of each block of steps that rank 0 reported together, without evaluations "
    "and without the first steps after a start."
)
_TIMELINE = (
    "What each process did since the last start of the run. Set up: data, model and rendezvous. "
    "Evaluations are those of rank 0; the others evaluate with it."
)


def plots_of(run: RunFiles) -> list[Plot]:
    """All plots that the run has data for, in the order of the page; the loss always."""
    metrics = run.metric_series()
    plots = [_loss(run, metrics.pop("loss", {}))]
    if metrics:
        plots.append(_panels("metrics", "Metrics", metrics))
    rates = dict(enumerate(run.history.learning_rate))
    logged = {_RATE: rates, **run.logged_series()}
    if rates:
        each_step = {name: {"each step": values} for name, values in logged.items()}
        title = "Learning rate" if len(logged) == 1 else "Learning rate and logged values"
        plots.append(_panels("logged", title, each_step))
    return [*plots, *_throughput(run), *_timeline(run)]


def _loss(run: RunFiles, parts: Mapping[str, Mapping[int, float]]) -> Plot:
    losses = run.history.loss
    if not losses:
        return Plot("loss", "Loss", "", "No step is done yet.")
    lines = [_line("each step", dict(enumerate(losses)), _EACH_STEP)]
    lines += [_line(part, values, _PARTS[part]) for part, values in parts.items()]
    rows = [("each step", f"{len(losses):,}", number(losses[0]), number(losses[-1]))]
    rows += [_row(part, values) for part, values in parts.items()]
    return Plot(
        "loss",
        "Loss",
        _LOSS,
        f"Loss over {counted(len(losses), 'step')}:"
        f" {listed([f'{r[0]} from {r[2]} to {r[3]}' for r in rows])}.",
        ("curve", "points", "first", "last"),
        tuple(rows),
        partial(curves.draw, [Panel("loss", lines)], "step"),
    )


def _panels(name: str, title: str, series: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Plot:
    """A plot with a panel for each of several quantities."""
    shown = dict(list(series.items())[:_MAX_PANELS])
    panels = [
        Panel(
            quantity,
            [_line(part, values, _PARTS.get(part, _EACH_STEP)) for part, values in parts.items()],
            from_zero=quantity == _RATE,
        )
        for quantity, parts in shown.items()
    ]
    rows = [
        (quantity, *_row(part, values))
        for quantity, parts in series.items()
        for part, values in parts.items()
    ]
    caption = "Over the steps done."
    if len(series) > len(shown):
        caption += f" The first {len(shown)} of {len(series)} are drawn; the table has all."
    return Plot(
        name,
        title,
        caption,
        f"{listed([f'{r[0]}, {r[1]}: from {r[3]} to {r[4]}' for r in rows])}.",
        ("quantity", "of", "points", "first", "last"),
        tuple(rows),
        partial(curves.draw, panels, "step"),
    )


def _line(label: str, values: Mapping[int, float], look: SeriesStyle) -> Line:
    """A curve, of many points every so many, the last one always."""
    steps = sorted(values)
    drawn = [*steps[:: curves.stride(len(steps))], *steps[-1:]]
    return Line(label, drawn, [values[step] for step in drawn], look, width=1.2)


def _row(part: str, values: Mapping[int, float]) -> tuple[str, str, str, str]:
    ordered = [values[step] for step in sorted(values)]
    return part, f"{len(ordered):,}", number(ordered[0]), number(ordered[-1])


def _throughput(run: RunFiles) -> Sequence[Plot]:
    rates = {rate.step: rate.samples_per_s for rate in run.rates}
    if not rates:
        return []
    unit = unit_of("rate", [statistics.median(rates.values())])
    values = sorted(rates.values())
    figures = {"least": values[0], "median": statistics.median(values), "most": values[-1]}
    rows = tuple((what, unit.text(value)) for what, value in figures.items())
    line = _line("samples/s", rates, SeriesStyle(SERIES_COLORS[2], "o", "-"))
    return [
        Plot(
            "throughput",
            "Throughput",
            _THROUGHPUT,
            f"Samples per second: {', '.join(f'{what} {value}' for what, value in rows)}.",
            ("of the blocks", "samples/s"),
            rows,
            partial(curves.draw, [Panel("samples/s", [line], from_zero=True)], "step"),
        )
    ]


def _timeline(run: RunFiles) -> Sequence[Plot]:
    tracks = list(dict.fromkeys(span.track for span in run.spans()))
    drawn = tracks[:_MAX_TRACKS]
    spans = [span for span in run.spans() if span.track in drawn and span.seconds > 0]
    if not spans:
        return []
    unit = unit_of("seconds", [timeline.length(spans)])
    table: dict[tuple[str, str], float] = {}
    for span in spans:
        key = span.track, span.name
        table[key] = table.get(key, 0.0) + span.seconds
    rows = tuple((track, name, unit.text(seconds)) for (track, name), seconds in table.items())
    caption = _TIMELINE
    if len(tracks) > len(drawn):
        caption += f" The first {len(drawn)} of {len(tracks)} processes are drawn."
    title = f"{run.plan['backend']}@{run.plan['replicas']}"
    mean = timeline.seconds_by_name(spans)
    shares = [f"{name} {unit.full(seconds)}" for name, seconds in mean.items()]
    return [
        Plot(
            "timeline",
            "Time line of the processes",
            caption,
            f"Means over the processes: {listed(shares)}.",
            ("process", "what", f"time, {unit.name}"),
            rows,
            partial(timeline.draw, {title: spans}, unit, "the last start"),
        )
    ]
