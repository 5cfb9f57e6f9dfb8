"""Summary of runs: raw measurements to repeats, and repeats to the estimates of every cell."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isotrain.analysis.compare.measurement.statistics import Bootstrap, quantile, rate
from isotrain.analysis.compare.records import (
    ESTIMATES,
    MIN_RUNS,
    Cell,
    Change,
    ComparisonRecord,
    Estimate,
    Repeat,
    difference,
)
from isotrain.core.contracts.plan import plain_differences
from isotrain.core.json_records import value
from isotrain.core.pipeline.delayed_updates import DELAYED_SCHEDULES
from isotrain.core.pipeline.schedules import PipelineShape, pipeline_bubble
from isotrain.core.system.trace_events import Span

_FORWARD = "forward"
_PASSES = (_FORWARD, "backward")
_BETWEEN = ("send", "wait")
_WAITING = "stages compute no pass for {share:.0%} of the time that those of a typical step take"
_PREDICTED = (
    "; (p - 1) / (v m + p - 1) predicts {predicted:.0%}, where all take equally long and sending takes"
    " nothing"
)


def _idle_notes(cell: Cell) -> list[str]:
    has_equal_stages = not isinstance(cell.plan.get("device_mesh", {}).get("stage"), list)
    schedule = cell.plan.get("strategy_options", {}).get("schedule")
    is_predictable = has_equal_stages and schedule not in DELAYED_SCHEDULES
    return idle_notes(cell.timeline, cell.replicas, is_predictable)


def idle_notes(timeline: Sequence[Span], replicas: int, is_predictable: bool = True) -> list[str]:
    """A note on the pipeline bubble of a typical step; empty without stages.

    Args:
        timeline: Spans of the step.
        replicas: Number of replicas.
        is_predictable: Whether a formula predicts the bubble: stages have one process, and steps a flush.
    """
    taken = [span for span in timeline if span.name in (*_PASSES, *_BETWEEN)]
    if not any(span.name in _BETWEEN for span in taken):
        return []
    tracks = [[s for s in taken if s.track == track] for track in {span.track for span in taken}]
    length = max(own[-1].start_s + own[-1].seconds - own[0].start_s for own in tracks)
    busy = sum(span.seconds for span in taken if span.name in _PASSES)
    forward = max(sum(span.name == _FORWARD for span in own) for own in tracks)
    waiting = _WAITING.format(share=1 - busy / length / len(tracks))
    if not is_predictable:
        return [waiting]
    shape = PipelineShape(len(tracks) // replicas, forward)
    return [waiting + _PREDICTED.format(predicted=pipeline_bubble(shape))]


_NOT_STEADY = "{count} of {runs} runs did not become steady within their limit"
_FEW_RUNS = (
    "fewer than {least} runs ({runs}) do not tell how runs differ: the intervals are too narrow"
)

_NO_FIGURES: dict[str, Any] = {
    **dict.fromkeys(ESTIMATES),
    "loss_difference": None,
    "plan_differences": [],
}


@dataclass(frozen=True)
class RunTimes:
    """Order, start and duration of a run.

    Attributes:
        order: Position among all runs of the comparison, from 0.
        began: Start as Unix time.
        seconds: Duration in seconds.
        others_cores: Cores that other programs kept busy just before, as in `Repeat`.
    """

    order: int
    began: float
    seconds: float
    others_cores: float | None = None


def repeat_of(raw: Mapping[str, Any], times: RunTimes) -> Repeat:
    """Combines the measurements of the processes of one run.

    A block's duration is that of its slowest process; CPU time is summed over processes.
    """
    ranks = raw["ranks"]
    main = ranks[0]
    blocks = main["blocks"]
    seconds = [max(block) for block in zip(*(r["blocks"]["seconds"] for r in ranks), strict=True)]
    cpu = [sum(block) for block in zip(*(r["blocks"]["cpu_s"] for r in ranks), strict=True)]
    steady = main["steady_state_start"]
    start = len(seconds) // 2 if steady is None else steady
    warm_steps = (
        main["opening_steps"] + sum(main["warm_up"]["steps"]) + sum(blocks["steps"][:start])
    )
    warm_seconds = main["opening_s"] + sum(main["warm_up"]["seconds"]) + sum(seconds[:start])
    step = sum(seconds[start:]) / sum(blocks["steps"][start:])
    return Repeat(
        order=times.order,
        started=times.began,
        block_steps=main["block_steps"],
        block_seconds=seconds[start:],
        warm_up_steps=warm_steps,
        compile_s=max(0.0, warm_seconds - warm_steps * step),
        first_step_s=max(r["first_step_at"] for r in ranks) - raw["started"],
        peak_memory_bytes=[r["peak_memory_bytes"] for r in ranks],
        cpu_s=sum(cpu[start:]),
        all_reduce_s=main["all_reduce_s"],
        block_samples=blocks["samples"][start:],
        steady=steady is not None,
        run_s=times.seconds,
        others_cores=times.others_cores,
    )


def with_run(cell: Cell, raw: Mapping[str, Any], times: RunTimes) -> Cell:
    """Adds a run to a cell; losses, metrics, plan and time line are those of its first run."""
    repeats = [*cell.repeats, repeat_of(raw, times)]
    cell = replace(cell, status="finished", reason=None, repeats=repeats)
    if len(repeats) > 1:
        return cell
    main = raw["ranks"][0]
    return replace(
        cell,
        collective=main["plan"]["collective"],
        exchanged_bytes=main["plan"]["exchanged_bytes_per_step"],
        losses=main["losses"],
        last_loss=main["losses"][-1],
        metrics=main["metrics"],
        timeline=_timeline(raw["ranks"]),
        plan=main["plan"],
        versions=main["versions"],
    )


def _timeline(ranks: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The spans of a typical step of every process."""
    return [
        Span(f"rank {rank}", name, start, seconds)
        for rank, process in enumerate(ranks)
        for name, start, seconds in process["timeline"]
    ]


def summarize(cells: Sequence[Cell], reference: str | None, seed: int) -> list[Cell]:
    """Computes the estimates of finished cells, also against the reference; clears those of all others."""
    rates = {c.name: throughput(c, seed) for c in cells if c.status == "finished"}
    known = next((c for c in cells if c.name == reference and c.status == "finished"), None)
    return [
        _related(_estimated(cell, rates[cell.name], seed), _single(cell, cells), rates, known)
        if cell.name in rates
        else replace(cell, notes=[], **_NO_FIGURES)
        for cell in cells
    ]


def throughput(cell: Cell, seed: int) -> Bootstrap:
    """Bootstrap of the samples per second over the steady blocks of all runs."""
    runs = [np.array([r.block_samples, r.block_seconds], np.float64).T for r in cell.repeats]
    return Bootstrap.of_runs(runs, rate, _generator(cell, seed))


def per_run(cell: Cell, values: Sequence[float], seed: int) -> Bootstrap:
    """Bootstrap of a figure with one value per run."""
    return Bootstrap.of_values(values, _generator(cell, seed))


def _generator(cell: Cell, seed: int) -> np.random.Generator:
    """A generator seeded by seed and cell name, independent of the other cells."""
    return np.random.default_rng([seed, zlib.crc32(cell.name.encode())])


def _estimated(cell: Cell, samples_per_s: Bootstrap, seed: int) -> Cell:
    runs = cell.repeats
    steps = [np.array(r.block_seconds)[:, None] / r.block_steps for r in runs]

    def of_steps(level: float) -> Estimate:
        return Bootstrap.of_runs(steps, quantile(level), _generator(cell, seed)).estimate()

    def each(values: Sequence[float]) -> Estimate:
        return per_run(cell, values, seed).estimate()

    all_reduce, bandwidth = _all_reduce(cell, each)
    return replace(
        cell,
        samples_per_s=samples_per_s.estimate(),
        step_s=of_steps(0.5),
        step_p95_s=of_steps(0.95),
        first_step_s=each([r.first_step_s for r in runs]),
        compile_s=each([r.compile_s for r in runs]),
        peak_memory_bytes=each([max(r.peak_memory_bytes) for r in runs]),
        total_memory_bytes=each([sum(r.peak_memory_bytes) for r in runs]),
        cpu_s_per_sample=each([r.cpu_s / sum(r.block_samples) for r in runs]),
        all_reduce_s=all_reduce,
        bus_bandwidth=bandwidth,
        notes=[*_notes(runs), *_idle_notes(cell)],
    )


def _all_reduce(
    cell: Cell, each: Callable[[Sequence[float]], Estimate]
) -> tuple[Estimate | None, Estimate | None]:
    """Seconds of an all-reduce, and its bus bandwidth in bytes per second."""
    times = [r.all_reduce_s for r in cell.repeats if r.all_reduce_s]
    if not times:
        return None, None
    size = value(float, cell.plan.get("gradient_bytes"), f"{cell.name}: plan.gradient_bytes")
    bus_bytes = 2 * (cell.replicas - 1) / cell.replicas * size
    return each(times), each([bus_bytes / seconds for seconds in times])


def _notes(runs: Sequence[Repeat]) -> list[str]:
    unsteady = sum(not run.steady for run in runs)
    notes = [_NOT_STEADY.format(count=unsteady, runs=len(runs))] if unsteady else []
    few = _FEW_RUNS.format(runs=len(runs), least=MIN_RUNS)
    return [*notes, few] if len(runs) < MIN_RUNS else notes


def _single(cell: Cell, cells: Sequence[Cell]) -> str | None:
    """Name of the cell with one replica of the same backend and strategy."""
    for other in cells:
        same = (other.backend, other.strategy) == (cell.backend, cell.strategy)
        if same and other.replicas == 1 and other.status == "finished":
            return other.name
    return None


def _related(
    cell: Cell, single: str | None, rates: Mapping[str, Bootstrap], reference: Cell | None
) -> Cell:
    """Relates a cell to one replica of its backend, and to the reference."""
    speedup = None
    if single is not None and single != cell.name:
        speedup = rates[cell.name].relative_to(rates[single])
    one = Estimate(1.0, 1.0, 1.0) if single == cell.name else None
    return replace(
        cell,
        speedup=speedup.estimate() if speedup else one,
        efficiency=speedup.scaled(1 / cell.replicas).estimate() if speedup else one,
        loss_difference=None if reference is None else largest_difference(reference, cell),
        plan_differences=[] if reference is None else plain_differences(reference.plan, cell.plan),
    )


def largest_difference(reference: Cell, cell: Cell) -> float | None:
    """The largest relative difference of two cells' losses; infinite if only one loss is finite."""
    pairs = list(zip(reference.losses, cell.losses, strict=False))
    return max((difference(one, two) for one, two in pairs), default=None)


def changes_since(
    old: ComparisonRecord, new: ComparisonRecord, *, margin: float, seed: int
) -> list[Change]:
    """The change of every cell of either comparison; slower is a cell by its whole interval and `margin`."""
    before = {cell.name: cell for cell in old.cells}
    note = _caveat(old, new)
    present = []
    for cell in new.cells:
        change = _change(before.pop(cell.name, None), cell, margin, seed)
        present.append(replace(change, note=change.note or note))
    return present + [Change(name, note="not measured now") for name in before]


def _caveat(old: ComparisonRecord, new: ComparisonRecord) -> str | None:
    """Differences in machine, spec or launcher that may explain changed figures; None without any."""
    names = ("processor", "cores", "gpus")
    caveats = []
    if any(old.machine.get(name) != new.machine.get(name) for name in names):
        caveats.append("another machine then")
    if {**old.spec, "name": None} != {**new.spec, "name": None}:
        caveats.append("another spec then")
    if old.settings.get("launcher") != new.settings.get("launcher"):
        caveats.append("by another launcher then")
    return "; ".join(caveats) or None


def _change(old: Cell | None, new: Cell, margin: float, seed: int) -> Change:
    if old is None:
        return Change(new.name, note="not measured then")
    if old.status != "finished" or new.status != "finished":
        return Change(new.name, note=f"{old.status} then, {new.status} now")
    samples_per_s = throughput(new, seed).relative_to(throughput(old, seed + 1)).estimate()

    def relative(figure: Callable[[Repeat], float]) -> Estimate:
        now = per_run(new, [figure(run) for run in new.repeats], seed)
        then = per_run(old, [figure(run) for run in old.repeats], seed + 1)
        return now.relative_to(then).estimate()

    return Change(
        new.name,
        samples_per_s=samples_per_s,
        first_step_s=relative(lambda run: run.first_step_s),
        peak_memory_bytes=relative(lambda run: max(run.peak_memory_bytes)),
        loss_difference=largest_difference(old, new),
        slower=samples_per_s.high < 1 - margin,
    )
