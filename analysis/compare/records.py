"""Records of a comparison: the content of `comparison.json`, from which every report is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from isotrain.core.json_format import json_page
from isotrain.core.system.trace_events import Span

FORMAT = 1
COMPARISON_FILE = "comparison.json"
MIN_RUNS = 3
"""Minimum number of runs of a cell whose interval accounts for the variation between runs."""
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
        """Whether the two intervals overlap, so that neither value counts as larger."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Repeat:
    """One run of a cell in new processes.

    Attributes:
        order: Position among all runs of the comparison, from 0, in the order they were made.
        started: Start of the run as Unix time.
        block_steps: Number of steps in every timed block.
        block_seconds: Duration of each steady block in seconds, the device idle at both ends.
        warm_up_steps: Number of steps before the steady state.
        compile_s: Seconds that warm-up and compilation took beyond as many steady steps.
        first_step_s: Seconds from the command to the end of the first step.
        peak_memory_bytes: Peak resident memory in bytes of each process, by rank.
        cpu_s: CPU seconds of all processes over the timed blocks.
        all_reduce_s: Median seconds of an all-reduce of the gradient's size, measured between steps;
            None with one replica.
        block_samples: Number of samples in each steady block.
        steady: Whether a steady state was reached; if not, the blocks are the later half of those
            timed within the limit.
        run_s: Seconds of the whole run, start and end of its processes included.
        others_cores: Number of cores that other programs of this machine kept busy just before the run;
            None if it runs on other hosts.
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
    others_cores: float | None = None


@dataclass(frozen=True)
class Cell:
    """One cell of the comparison's grid: a backend with a number of replicas, and its measurements.

    Attributes:
        name: `BACKEND[:COLLECTIVE]@REPLICAS`, with ` STRATEGY` where several are compared.
        backend: Backend name, without its collective.
        collective: Collective of the plan; `none` with one replica.
        replicas: Number of replicas.
        strategy: Strategy as requested, `NAME[,OPTION=VALUE...]`.
        python: Path of the interpreter; None: the one that compares.
        status: `finished`, `failed` or `skipped`; only finished cells have estimates.
        reason: Full error of a failed cell, or why a cell was skipped.
        repeats: Runs of the cell.
        samples_per_s: Throughput in the steady state, in samples per second.
        step_s: Median duration of a step in seconds.
        step_p95_s: 95th percentile of the step duration in seconds, over the timed blocks.
        first_step_s: Seconds from the command to the end of the first step.
        compile_s: Seconds that warm-up and compilation take beyond as many steady steps.
        peak_memory_bytes: Peak resident memory of the largest process in bytes.
        total_memory_bytes: Peak resident memory summed over all processes, in bytes.
        cpu_s_per_sample: CPU seconds of all processes per sample.
        speedup: Throughput relative to one replica of the same backend and strategy; None without that cell.
        efficiency: Scaling efficiency, `speedup / replicas`.
        all_reduce_s: Seconds of an all-reduce of the gradient's size, measured between steps; None with
            one replica.
        bus_bandwidth: Bus bandwidth of that all-reduce in bytes per second, `2 (n - 1) / n * bytes / time`
            for `bytes` over n replicas (as in nccl-tests); None with one replica.
        exchanged_bytes: Bytes that each replica sends per step, from the plan.
        losses: Mean loss of every global batch of the first steps.
        last_loss: Last of `losses`.
        metrics: Training metrics over the same steps, by name; validation metrics after them as
            `validation_<name>`.
        loss_difference: Largest relative difference of `losses` to the reference cell's.
        timeline: Spans of a typical step.
        plan: Plan of the run as plain values.
        plan_differences: Differences to the reference cell's plan, each `(field, reference value, value)`.
        versions: Version of every package the cell ran with, by package.
        notes: Caveats of the figures above.
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
    last_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    loss_difference: float | None = None
    timeline: list[Span] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    plan_differences: list[tuple[str, Any, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def memory_per_replica(self) -> Estimate | None:
        """Peak resident memory per replica in bytes: the sum over processes divided by `replicas`."""
        total = self.total_memory_bytes
        if total is None:
            return None
        return Estimate(*(each / self.replicas for each in (total.value, total.low, total.high)))


@dataclass(frozen=True)
class Verdict:
    """The fastest cell, or the cells whose intervals overlap too much to say.

    Attributes:
        pick: Name of the cell with the highest throughput; None if no cell is significantly faster.
        tied: Names of the cells that cannot be told from the fastest; empty where `pick` is set.
        reason: The verdict in one or two sentences with its figures.
    """

    pick: str | None
    tied: list[str]
    reason: str


@dataclass(frozen=True)
class Change:
    """The change of a cell since an earlier comparison; ratios are new over old.

    Attributes:
        cell: Cell name.
        samples_per_s: Throughput ratio; below 1 is slower. This and the following ratios are None
            where either comparison lacks the figure.
        first_step_s: Ratio of the time to the first step.
        peak_memory_bytes: Ratio of the peak memory of the largest process.
        loss_difference: Largest relative difference between old and new losses.
        slower: Whether the whole interval of the throughput ratio lies below `1 - margin`.
        note: Reason why there is no figure, or another difference between the two comparisons.
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
    """All results of one comparison.

    Attributes:
        name: Spec name.
        spec: Resolved spec as plain values.
        reference: Name of the cell that losses and plans are compared with.
        created: Start of the comparison as Unix time.
        finished: Whether every requested run of every cell was made.
        machine: Processor, cores, memory and operating system.
        settings: Fields of `CompareSettings`: repeats, steps, seed, threads, time budget.
        cells: Cells in the requested order.
        verdict: The fastest cell, or the tied ones.
        changes: Change of every cell since the earlier comparison in `against`.
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
        """The cell with the given name; a `KeyError` if there is none."""
        return {cell.name: cell for cell in self.cells}[name]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """The comparison as JSON text: what `comparison.json` holds."""
        return json_page(self.to_dict()) + "\n"


ESTIMATES = tuple(f.name for f in dataclasses.fields(Cell) if f.type == "Estimate | None")
"""Names of the `Estimate` fields of `Cell`; `Change` uses the same names."""


def difference(one: float, two: float) -> float:
    """The relative difference of two losses; infinite where only one of them is finite."""
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.inf
    return abs(two - one) / max(abs(one), abs(two))
