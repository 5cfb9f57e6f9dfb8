"""Changes of cells since an earlier comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from isotrain.analysis.compare import summary
from isotrain.analysis.compare.records import Cell, Change, ComparisonRecord, Estimate, Repeat


def since(
    old: ComparisonRecord, new: ComparisonRecord, *, margin: float, seed: int
) -> list[Change]:
    """The change of every cell of either comparison.

    Args:
        old: Earlier comparison.
        new: Present comparison, its cells summarised.
        margin: Fraction by which the whole interval of the throughput must fall to count as slower.
        seed: Seed of the bootstrap.
    """
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
    rate = summary.throughput(new, seed).relative_to(summary.throughput(old, seed + 1)).estimate()

    def relative(value: Callable[[Repeat], float]) -> Estimate:
        now = summary.per_run(new, [value(run) for run in new.repeats], seed)
        then = summary.per_run(old, [value(run) for run in old.repeats], seed + 1)
        return now.relative_to(then).estimate()

    return Change(
        new.name,
        samples_per_s=rate,
        first_step_s=relative(lambda run: run.first_step_s),
        peak_memory_bytes=relative(lambda run: max(run.peak_memory_bytes)),
        loss_difference=summary.largest_difference(old, new),
        slower=rate.high < 1 - margin,
    )
