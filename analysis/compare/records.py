"""What a comparison found, as plain records: what `comparison.json` holds and every report reads."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from isotrain.core.json_format import json_page

FORMAT = 1
COMPARISON_FILE = "comparison.json"
MIN_RUNS = 3
"""Runs of a cell from which on an interval knows how runs differ."""
CellStatus = Literal["finished", "failed", "skipped"]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % bootstrap interval.

    Attributes:
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    value: float
    low: float
    high: float

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals have a number in common: then there is no telling which is larger."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Span:
    """One piece of the time line of a typical step.

    Attributes:
        track: Who does it, such as `rank 0`.
        name: What is done: `input`, `step` (of stages, what they do in it), `device`.
        start_s: Seconds after the start of the step.
        seconds: How long it takes.
    """

    track: str
    name: str
    start_s: float
    seconds: float


@dataclass(frozen=True)
class Repeat:
    """One run of a cell in new processes.

    Attributes:
        order: Position among all runs of the comparison, from 0, in the order they were made.
        started: Unix time.
        block_steps: Steps of every timed block of the steady state.
        block_seconds: Duration of each block, the device idle at both ends.
        warm_up_steps: Steps before the steady state was found.
        compile_s: Seconds that the warm-up took beyond as many steady steps.
        first_step_s: Seconds from the command to the end of the first step.
        peak_memory_bytes: Resident memory at its highest, per process by rank.
        cpu_s: Processor seconds of all processes over the timed blocks.
        all_reduce_s: Seconds that one all-reduce of the gradient's size takes by itself, between
            steps; None with one replica.
        block_samples: Samples of every timed block.
        steady: Whether a steady state was found; otherwise the blocks are the later half of those
            that the limit left time for.
        run_s: Seconds of the whole run, the start and end of its processes included.
    """

    order: int
    started: float
    block_steps: int
    block_seconds: list[float]
    warm_up_steps: int
    compile_s: float
    first_step_s: float
    peak_memory_bytes: list[int]
    cpu_s: float
    all_reduce_s: float | None
    block_samples: list[int] = field(default_factory=list)
    steady: bool = True
    run_s: float = 0.0


@dataclass(frozen=True)
class Cell:
    """One backend with one number of replicas, and all that was measured of it.

    Attributes:
        name: `BACKEND[:COLLECTIVE]@REPLICAS`, with ` STRATEGY` where several are compared.
        backend: Its name.
        collective: The collective that was really used; `none` with one replica.
        replicas: How many.
        strategy: `NAME[,OPTION=VALUE...]`, as asked for.
        python: The interpreter, where it is not this program's own.
        status: `failed` and `skipped` cells have a reason, and no estimates.
        reason: Why it failed or was skipped, in full.
        repeats: Its runs.
        samples_per_s: Throughput over the steady state.
        step_s: Median seconds of a step.
        step_p95_s: 95th percentile of the seconds of a step, over the timed blocks.
        first_step_s: Seconds from the command to the end of the first step.
        compile_s: Seconds that warm-up and compilation take beyond as many steady steps.
        peak_memory_bytes: Of the largest process.
        total_memory_bytes: Of all processes together.
        cpu_s_per_sample: Processor seconds of all processes.
        speedup: Throughput relative to one replica of the same backend and strategy; None without that cell.
        efficiency: `speedup` divided by `replicas`.
        all_reduce_s: Seconds that one all-reduce of the gradient's size takes by itself, between
            steps; None with one replica.
        bus_bandwidth: Bytes per second that every link carries, `2 (n - 1) / n * bytes / time` for an
            all-reduce of `bytes` over n replicas, measured by itself on the gradient's size; None with one.
        exchanged_bytes: Bytes that each replica sends per step, from the plan.
        losses: Mean loss of every global batch of the first steps of the training.
        final_loss: The last of them.
        metrics: Over the same steps, by name; after them, the evaluation's as `validation_<name>`.
        loss_difference: Largest relative difference of `losses` to the reference cell's.
        timeline: A typical step.
        plan: The plan it followed.
        plan_differences: What differs from the reference cell's plan: rows of field, its value, ours.
        versions: Packages it ran with.
        notes: What limits the numbers above.
    """

    name: str
    backend: str
    collective: str
    replicas: int
    strategy: str
    python: str | None = None
    status: CellStatus = "finished"
    reason: str | None = None
    repeats: list[Repeat] = field(default_factory=list)
    samples_per_s: Estimate | None = None
    step_s: Estimate | None = None
    step_p95_s: Estimate | None = None
    first_step_s: Estimate | None = None
    compile_s: Estimate | None = None
    peak_memory_bytes: Estimate | None = None
    total_memory_bytes: Estimate | None = None
    cpu_s_per_sample: Estimate | None = None
    speedup: Estimate | None = None
    efficiency: Estimate | None = None
    all_reduce_s: Estimate | None = None
    bus_bandwidth: Estimate | None = None
    exchanged_bytes: float | None = None
    losses: list[float] = field(default_factory=list)
    final_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    loss_difference: float | None = None
    timeline: list[Span] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    plan_differences: list[tuple[str, Any, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def memory_per_replica(self) -> Estimate | None:
        """Resident memory of all processes together, for each replica; in bytes."""
        total = self.total_memory_bytes
        if total is None:
            return None
        return Estimate(*(each / self.replicas for each in (total.value, total.low, total.high)))


@dataclass(frozen=True)
class Verdict:
    """Which cell to take.

    Attributes:
        pick: Name of the cell with the highest throughput, or None when there is no telling.
        tied: Names of the cells that cannot be told from the fastest; empty where `pick` is set.
        reason: The same in a sentence or two, with the figures.
    """

    pick: str | None
    tied: list[str]
    reason: str


@dataclass(frozen=True)
class Change:
    """What became of a cell since an earlier comparison.

    Attributes:
        cell: Its name.
        samples_per_s: Throughput now relative to then; below 1 is slower. None where one of the two
            has no figure, as for all that follow.
        first_step_s: Time to the first step now relative to then.
        peak_memory_bytes: Memory of the largest process now relative to then.
        loss_difference: Largest relative difference between the losses then and now.
        slower: Whether it is slower by more than the margin, the whole interval beyond it.
        note: Why there is no figure, or what else differs between then and now.
    """

    cell: str
    samples_per_s: Estimate | None = None
    first_step_s: Estimate | None = None
    peak_memory_bytes: Estimate | None = None
    loss_difference: float | None = None
    slower: bool = False
    note: str | None = None


@dataclass(frozen=True)
class ComparisonRecord:
    """Everything that one comparison measured.

    Attributes:
        name: The spec's name.
        spec: The resolved spec as plain values.
        reference: Name of the cell that losses and plans are compared with.
        created: Unix time of its start.
        finished: Whether every cell and repeat that was asked for was made.
        machine: Processor, cores, memory, system.
        settings: How it was measured: repeats, steps, seed, threads, time budget.
        cells: In the order they were asked for.
        verdict: Which to take.
        changes: Since an earlier comparison, where one was given.
    """

    name: str
    spec: dict[str, Any]
    reference: str | None
    created: float
    finished: bool
    machine: dict[str, Any]
    settings: dict[str, Any]
    cells: list[Cell]
    verdict: Verdict
    changes: list[Change] = field(default_factory=list)

    def cell(self, name: str) -> Cell:
        """The cell of that name.

        Raises:
            KeyError: There is none.
        """
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """The comparison as JSON text: what `comparison.json` holds."""
        return json_page(self.to_dict()) + "\n"


ESTIMATES = tuple(f.name for f in dataclasses.fields(Cell) if f.type == "Estimate | None")
"""The fields of a cell that are estimates; those of a change have the same names."""


def difference(one: float, two: float) -> float:
    """Of two losses, relative to the larger of them; infinite where just one is no number."""
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.inf
    return abs(two - one) / max(abs(one), abs(two))
