"""What the runs say, as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers.rounds import Results
from benchmarks.peers.run import Cell
from benchmarks.statistics import Estimate, median


@dataclass(frozen=True)
class Row:
    """One cell.

    Attributes:
        cell: Which.
        step_ms: Milliseconds per step.
        ratio: Of the step to that of its reference in the same round; None where the latter was not
            measured.
        first_step: Seconds from the command to the end of the first step.
        added: Seconds of it more than the reference took in the same round.
        memory: MiB at the peak.
    """

    cell: Cell
    step_ms: Estimate
    ratio: Estimate | None
    first_step: Estimate
    added: Estimate | None
    memory: float

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "contender": self.cell.contender.name,
            "reference": self.cell.contender.reference,
            "workload": self.cell.workload,
            "replicas": self.cell.replicas,
            "threads": self.cell.threads,
            "step_ms": vars(self.step_ms),
            "ratio": self.ratio and vars(self.ratio),
            "first_step_s": vars(self.first_step),
            "first_step_added_s": self.added and vars(self.added),
            "peak_mib": self.memory,
        }

    def line(self) -> str:
        """One line of a Markdown table."""
        return (
            f"| {self.cell.contender.name} | {self.step_ms.text()} |"
            f" {self.ratio.text() if self.ratio else ''} | {self.first_step.text(digits=2)} |"
            f" {self.added.text(digits=2) if self.added else ''} | {self.memory:.0f} |"
        )


def rows(first: Results, timed: Results) -> list[Row]:
    """A row per cell, in the order of the cells."""
    by_place = {(c.contender.name, c.workload, c.replicas): c for c in timed}

    def row(cell: Cell) -> Row:
        steps = _column(timed, cell, "step")
        starts = _column(timed, cell, "first_step")
        reference = by_place.get((cell.contender.reference, cell.workload, cell.replicas))
        compared = reference is not None and reference != cell
        return Row(
            cell,
            median(steps * 1e3),
            median(steps / _column(timed, reference, "step")) if compared else None,
            median(starts),
            median(starts - _column(timed, reference, "first_step")) if compared else None,
            first[cell][0].memory,
        )

    return [row(cell) for cell in timed]


def _column(results: Results, cell: Cell | None, name: str) -> np.ndarray:
    assert cell is not None
    return np.array([getattr(measured, name) for measured in results[cell]])


def markdown(all_rows: list[Row], machine: dict[str, str]) -> str:
    """The whole table, one section per workload and number of replicas."""
    facts = "; ".join(f"{name}: {value}" for name, value in machine.items())
    sections = [f"Seen on this machine: {facts}."]
    places = dict.fromkeys((row.cell.workload, row.cell.replicas) for row in all_rows)
    for workload, replicas in places:
        own = [r for r in all_rows if (r.cell.workload, r.cell.replicas) == (workload, replicas)]
        sections.append(
            f"### {workload}, {replicas} {'replica' if replicas == 1 else 'replicas'} with"
            f" {own[0].cell.threads} {'thread' if own[0].cell.threads == 1 else 'threads'} each\n\n"
            "| contender | step, ms | times by hand | to the first step, s | more than by hand, s |"
            " peak memory, MiB |\n|---|---|---|---|---|---|\n" + "\n".join(r.line() for r in own)
        )
    return "\n\n".join(sections) + "\n"
