"""Tables of the measurements, as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers.contenders import PEERS
from benchmarks.peers.rounds import Results
from benchmarks.peers.run import Cell
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.statistics import Estimate, median


@dataclass(frozen=True)
class Row:
    """Row of a table: the figures of one cell.

    Attributes:
        cell: Cell of the row.
        step_ms: Milliseconds per step.
        ratio: Ratio of the step to that of its reference in the same round; None where the latter was not
            measured.
        to_native: The same of a portable model to the native one under the same backend.
        to_peer: The same of isotrain to the peer whose median is the smallest.
        first_step: Seconds from the command to the end of the first step.
        added: Seconds of it more than the reference took in the same round.
        memory: MiB at the peak.
    """

    cell: Cell
    step_ms: Estimate
    ratio: Estimate | None
    to_native: Estimate | None
    to_peer: Estimate | None
    first_step: Estimate
    added: Estimate | None
    memory: float

    def record(self) -> dict[str, Any]:
        """The row as JSON values."""
        return {
            "contender": self.cell.contender.name,
            "reference": self.cell.contender.reference,
            "workload": self.cell.workload,
            "replicas": self.cell.replicas,
            "threads": self.cell.threads,
            "step_ms": vars(self.step_ms),
            "ratio": self.ratio and vars(self.ratio),
            "ratio_to_native": self.to_native and vars(self.to_native),
            "ratio_to_fastest_peer": self.to_peer and vars(self.to_peer),
            "first_step_s": vars(self.first_step),
            "first_step_added_s": self.added and vars(self.added),
            "peak_mib": self.memory,
        }

    def line(self) -> str:
        """One line of a Markdown table."""
        return (
            f"| {self.cell.contender.name} | {self.step_ms.text()} |"
            f" {_text(self.ratio)} | {_text(self.to_native)} | {_text(self.to_peer)} |"
            f" {_text(self.first_step, 2)} | {_text(self.added, 2)} | {self.memory:.0f} |"
        )


def _text(estimate: Estimate | None, digits: int = 3) -> str:
    return "" if estimate is None else estimate.text(digits=digits)


def rows(first: Results, timed: Results) -> list[Row]:
    """A row per cell, in the order of the cells."""
    by_configuration = {(cell.contender.name, cell.configuration): cell for cell in timed}

    def row(cell: Cell) -> Row:
        def beside(name: str) -> Cell | None:
            return by_configuration.get((name, cell.configuration))

        reference = beside(cell.contender.reference)
        other = None if reference == cell else reference
        starts = _column(timed, cell, "first_step")
        return Row(
            cell,
            median(_column(timed, cell, "step") * 1e3),
            _ratio(timed, cell, other),
            _ratio(timed, cell, beside(cell.contender.native)),
            _ratio(timed, cell, _fastest_peer(timed, cell)),
            median(starts),
            None if other is None else median(starts - _column(timed, other, "first_step")),
            first[cell][0].memory,
        )

    return [row(cell) for cell in timed]


def _ratio(timed: Results, cell: Cell, other: Cell | None) -> Estimate | None:
    """Ratio of the steps of two cells in the same round."""
    if other is None:
        return None
    return median(_column(timed, cell, "step") / _column(timed, other, "step"))


def _fastest_peer(timed: Results, cell: Cell) -> Cell | None:
    """The peer that an isotrain contender is compared to; None for others, and where none was measured."""
    if cell.contender.program != "with_isotrain":
        return None
    own = (cell.contender.reference, cell.configuration)
    peers = [
        each
        for each in timed
        if each.contender.name in PEERS and (each.contender.reference, each.configuration) == own
    ]
    return min(peers, key=lambda each: np.median(_column(timed, each, "step")), default=None)


def _column(results: Results, cell: Cell, name: str) -> np.ndarray:
    """A figure of a cell in each round, shape `[rounds]`."""
    return np.array([getattr(measured, name) for measured in results[cell]])


def markdown(all_rows: list[Row], machine: dict[str, str]) -> str:
    """All in one table, and then one section per workload and number of replicas and threads."""
    facts = "; ".join(f"{name}: {value}" for name, value in machine.items())
    sections = [f"Seen on this machine: {facts}.", condensed(all_rows)]
    for place in dict.fromkeys(row.cell.configuration for row in all_rows):
        workload, replicas, threads = place
        own = [row for row in all_rows if row.cell.configuration == place]
        sections.append(
            f"### {workload}, {replicas} {'replica' if replicas == 1 else 'replicas'} with"
            f" {threads} {'thread' if threads == 1 else 'threads'} each\n\n{_compared(workload)}"
            "| contender | step, ms | times by hand | times native | times the fastest peer |"
            " to the first step, s | more than by hand, s | peak memory, MiB |\n"
            "|---|---|---|---|---|---|---|---|\n" + "\n".join(r.line() for r in own)
        )
    return "\n\n".join(sections) + "\n"


def condensed(all_rows: list[Row]) -> str:
    """One line per backend, workload, replicas and threads: isotrain's models beside the loop by hand."""
    found = {(row.cell.contender.name, row.cell.configuration): row for row in all_rows}
    names = list(dict.fromkeys(name for name, _ in found))
    lines = [
        _condensed(found[name, place], native, portable)
        for name, place in sorted(found, key=lambda each: names.index(each[0]))
        for native in [found.get((f"isotrain/{name}/native", place))]
        for portable in [found.get((f"isotrain/{name}/portable", place))]
        if native or portable
    ]
    return (
        "| backend | workload | replicas x threads | by hand, ms | native, times by hand | native, times the"
        " fastest peer | portable, times by hand | portable, times native | native's first step, s more than"
        " by hand | portable's | peak memory, MiB: by hand, native, portable |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(lines)
    )


def _condensed(by_hand: Row, native: Row | None, portable: Row | None) -> str:
    workload, replicas, threads = by_hand.cell.configuration
    seen = [
        by_hand.step_ms,
        native.ratio if native else None,
        native.to_peer if native else None,
        portable.ratio if portable else None,
        portable.to_native if portable else None,
        native.added if native else None,
        portable.added if portable else None,
    ]
    memory = [f"{row.memory:.0f}" if row else "not run" for row in (by_hand, native, portable)]
    where = [by_hand.cell.contender.name, workload, f"{replicas} x {threads}"]
    return f"| {' | '.join([*where, *(_text(each, 2) for each in seen), ', '.join(memory)])} |"


def _compared(workload: str) -> str:
    """Says where losses were compared for a part of the run only."""
    work = WORKLOADS[workload]
    if not work.rounding_grows:
        return ""
    return (
        f"Losses were compared over the first {work.first_steps} of {work.steps} steps (within"
        f" {work.tolerance:g}): rounding grows to percents after them.\n\n"
    )
