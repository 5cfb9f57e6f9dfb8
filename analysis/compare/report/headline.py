"""Sentences of a comparison: what was trained, by which command, and why each cell is as fast as it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from isotrain.analysis.compare.records import Cell, ComparisonRecord
from isotrain.analysis.compare.settings import CompareRequest, run_seconds
from isotrain.analysis.pages.units import unit_of
from isotrain.core.pipeline.action_timer import EXPOSED_EXCHANGE
from isotrain.core.reporting.tables import text_of

_LEAST_SECONDS = 1e-12


def trained(comparison: ComparisonRecord) -> str:
    """The model, its data and the sizes, in a sentence."""
    spec = comparison.spec
    plan: Mapping[str, Any] = next((c.plan for c in comparison.cells if c.plan), {})
    parts = [
        f"{text_of(plan[name])} {what}"
        for name, what in (("parameters", "parameters"), ("samples", "samples"))
        if plan.get(name)
    ]
    if batch := spec.get("global_batch_size", plan.get("global_batch_size")):
        parts.append(f"global batches of {text_of(batch)}")
    if precision := spec.get("precision", plan.get("precision")):
        parts.append(str(precision))
    return f"Trained model: {spec.get('model', comparison.name)}; {', '.join(parts)}."


def command(comparison: ComparisonRecord) -> str:
    """The command that makes the comparison again, from its spec in a file."""
    settings = comparison.settings
    words = ["isotrain", "compare", f"{comparison.name}.json"]
    for option, values in (("--backend", "backends"), ("--strategy", "strategies")):
        words += [word for value in _list(settings.get(values)) for word in (option, str(value))]
    if replicas := _list(settings.get("replicas")):
        words += ["--replicas", ",".join(map(str, replicas))]
    names = {"--repeats": "repeats", "--steps": "steps", "--seed": "seed"}
    words += [w for o, name in names.items() if name in settings for w in (o, str(settings[name]))]
    words += [w for name, seconds in _limits(comparison) for w in (name, f"{seconds:.12g}s")]
    first = next((cell.name for cell in comparison.cells if cell.status == "finished"), None)
    if comparison.reference not in (None, first):
        words += ["--reference", str(comparison.reference)]
    for backend, path in _mapping(settings.get("interpreters")).items():
        words += ["--interpreter", f"{backend}={path}"]
    launcher = _mapping(settings.get("launcher"))
    if launcher:
        words += ["--launcher", str(launcher.get("name"))]
        options = _mapping(launcher.get("options")).items()
        words += [w for name, value in options for w in ("--launcher-option", f"{name}={value}")]
    return shlex.join(words)


def _limits(comparison: ComparisonRecord) -> Iterator[tuple[str, float]]:
    """Options of the time budget, and of the limit of a run unless it is the default, with seconds."""
    budget, limit = (
        seconds if isinstance(seconds := comparison.settings.get(name), int | float) else None
        for name in ("time_budget_s", "run_seconds")
    )
    if budget:
        yield "--time-budget", budget
    default = run_seconds(CompareRequest(time_budget=budget), len(comparison.cells))
    if limit not in (None, default):
        yield "--run-limit", limit


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def why(cell: Cell, comparison: ComparisonRecord) -> str:
    """The parts of a cell's step time, in a sentence."""
    if cell.step_s is None or cell.samples_per_s is None:
        return cell.reason or "no reason was recorded"
    unit = unit_of("seconds", [cell.step_s.value])
    parts = [f"a step takes {unit.full(cell.step_s.value)}"]
    single = _single(cell, comparison.cells)
    if cell.replicas > 1 and single is not None and single.step_s is not None:
        ideal = single.step_s.value / cell.replicas
        parts.append(f"ideal by one replica is {unit.full(ideal)}")
    if cell.all_reduce_s is not None:
        share = cell.all_reduce_s.value / max(cell.step_s.value, _LEAST_SECONDS)
        alone = unit.full(cell.all_reduce_s.value)
        parts.append(f"an all-reduce by itself takes {alone}, {share:.0%} of the step")
    total = sum(span.seconds for span in cell.timeline)
    for name, awaited in (("input", "input"), (EXPOSED_EXCHANGE, "the exchange")):
        waits = [span.seconds for span in cell.timeline if span.name == name]
        if total and waits:
            parts.append(f"{sum(waits) / total:.0%} of the step is waiting for {awaited}")
    cores = comparison.machine.get("cores")
    if cell.cpu_s_per_sample is not None and isinstance(cores, int):
        busy = cell.cpu_s_per_sample.value * cell.samples_per_s.value
        parts.append(f"its processes keep {busy:.2g} of {cores} cores busy")
    return "; ".join(parts)


def _single(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """The finished cell with one replica of the same backend and strategy."""
    same = (c for c in cells if (c.backend, c.strategy) == (cell.backend, cell.strategy))
    return next((c for c in same if c.replicas == 1 and c.status == "finished"), None)
