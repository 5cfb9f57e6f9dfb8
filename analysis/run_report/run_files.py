"""Content of the files of a run directory, of a run that has ended or still goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import (
    Evaluating,
    Event,
    Finished,
    ProcessEvent,
    Ready,
    Restarted,
    RunFailed,
    Started,
    Steps,
)
from isotrain.core.launching.run_directory.run_directory import (
    EVENTS_FILE,
    PLAN_FILE,
    RESULT_FILE,
    SPEC_FILE,
    STEPS_FILE,
    VERSIONS_FILE,
    read_events,
    read_fields,
)
from isotrain.core.launching.run_directory.run_listing import RunSummary, summarize_run
from isotrain.core.results.result import History, RunResult, read_history, read_result
from isotrain.core.system.trace_events import Span

_EVALUATION = "validation_"


@dataclass(frozen=True)
class ProcessTimes:
    """One process of the last start of a run; times in Unix seconds, None where it has not come so far.

    Attributes:
        rank: Rank of the process.
        host: Host that it runs on.
        started: When it started.
        ready: When it had loaded its data and built its model.
        ended: When it finished or failed.
        peak_memory_bytes: Peak resident memory in bytes; None until it has finished.
    """

    rank: int
    host: str
    started: float
    ready: float | None = None
    ended: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Rate:
    """Throughput of a block of steps.

    Attributes:
        step: Index of the last step of the block.
        samples_per_s: Samples per second, evaluations left out.
    """

    step: int
    samples_per_s: float


class RunFiles:
    """The files of a run directory, each read once.

    Attributes:
        folder: Path of the run directory.
        summary: State and progress.
        spec: Content of `spec.json`.
        plan: Content of `plan.json`, with the measured numbers once a process is ready.
        versions: Content of `versions.json`.
        result: Result of the run; None before its end, and for runs of `isotrain.launch`.
        history: Losses, rates and metrics so far.
        events: Events of `events.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the files.

        Raises:
            PlanError: The folder is no run directory.
            IsotrainError: A file is damaged.
        """
        self.folder = folder
        self.summary: RunSummary = summarize_run(folder)
        self.spec = read_fields(folder, SPEC_FILE)
        self.versions = read_fields(folder, VERSIONS_FILE)
        self.events: Sequence[Event] = list(read_events(folder / EVENTS_FILE))
        plans = [event.plan for event in self.events if isinstance(event, Ready) and event.plan]
        self.plan: Mapping[str, Any] = plans[-1] if plans else read_fields(folder, PLAN_FILE)
        self.result: RunResult | None = None
        if (folder / RESULT_FILE).is_file():
            self.result = read_result(folder)
        self._blocks: Sequence[Steps] = [
            event for event in read_events(folder / STEPS_FILE) if isinstance(event, Steps)
        ]
        self.history: History = read_history(folder) if self._blocks else History()

    @cached_property
    def last_start(self) -> Sequence[Event]:
        """The events from the last start on; a run that was restarted or resumed has several."""
        begin, ranks, has_run = 0, set[int](), False
        for index, event in enumerate(self.events):
            if isinstance(event, Started):
                if has_run or event.rank in ranks:
                    begin, ranks, has_run = index, set(), False
                ranks.add(event.rank)
            elif isinstance(event, Restarted | RunFailed) or (
                isinstance(event, Ready) and event.plan  # rank 0 has met all others
            ):
                has_run = True
        return self.events[begin:]

    @property
    def first_start(self) -> float:
        """Start of the first process of all, as Unix time; 0 before."""
        return min((e.time for e in self.events if isinstance(e, Started)), default=0.0)

    @property
    def start(self) -> float:
        """Start of the first process of the last start, as Unix time; 0 before."""
        return min((process.started for process in self.processes), default=0.0)

    @property
    def now(self) -> float:
        """Time of the last event, as Unix time."""
        times = [e.time for e in (*self.events, *self._blocks) if isinstance(e, ProcessEvent)]
        return max(times, default=0.0)

    @cached_property
    def processes(self) -> list[ProcessTimes]:
        """The processes of the last start, by rank."""
        hosts = {each["rank"]: each["host"] for each in self.plan.get("processes", ())}
        times: dict[int, dict[str, Any]] = {}
        for event in self.last_start:
            if isinstance(event, Started):
                times[event.rank] = {"started": event.time}
            elif isinstance(event, ProcessEvent) and event.rank in times:
                if isinstance(event, Ready):
                    times[event.rank]["ready"] = event.time
                elif event.kind in ("finished", "failed"):
                    times[event.rank]["ended"] = event.time
                if isinstance(event, Finished):
                    times[event.rank]["peak_memory_bytes"] = event.peak_memory_bytes
        return [
            ProcessTimes(rank, hosts.get(rank, ""), **fields)
            for rank, fields in sorted(times.items())
        ]

    @cached_property
    def evaluations(self) -> list[tuple[float, float]]:
        """Begin and end of each evaluation on rank 0, as Unix time."""
        of_main = [e for e in (*self.events, *self._blocks) if isinstance(e, ProcessEvent)]
        times = sorted((e.time, isinstance(e, Evaluating)) for e in of_main if e.rank == 0)
        pairs = zip(times, [*times[1:], (self.now, False)], strict=True)
        return [(time, after) for (time, begins), (after, _) in pairs if begins]

    @cached_property
    def rates(self) -> list[Rate]:
        """Throughput of each block of steps but the first after a start, which has the warm-up."""
        starts = [event.time for event in self.events if isinstance(event, Started)]
        rates = []
        for before, block in zip(self._blocks, self._blocks[1:], strict=False):
            if any(before.time < start <= block.time for start in starts):
                continue
            seconds = block.time - before.time - self._evaluated(before.time, block.time)
            if seconds > 0:
                samples = sum(map(self._samples, self._steps_of(block)))
                rates.append(Rate(block.first + len(block.losses) - 1, samples / seconds))
        return rates

    @staticmethod
    def _steps_of(block: Steps) -> range:
        return range(block.first, block.first + len(block.losses))

    def _evaluated(self, begin: float, end: float) -> float:
        """Seconds between two times that rank 0 has evaluated."""
        return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in self.evaluations)

    def _samples(self, step: int) -> int:
        """Number of samples in a step's global batch; the last of an epoch may have fewer."""
        batch: int = self.plan["global_batch_size"]
        samples, steps = self.plan.get("samples"), self.plan.get("steps_per_epoch")
        if not samples or not steps or steps != -(-samples // batch):
            return batch
        return int(min(batch, samples - step % steps * batch))

    def metric_series(self) -> dict[str, dict[str, dict[int, float]]]:
        """Metrics of epochs and evaluations: by metric, by part (`training`, `validation`), by steps done."""
        series: dict[str, dict[str, dict[int, float]]] = {}
        for step, name, number in self._metrics():
            metric, part = name, "training"
            if name.startswith(_EVALUATION):
                metric, part = name.removeprefix(_EVALUATION), "validation"
            series.setdefault(metric, {}).setdefault(part, {})[step] = number
        return series

    def _metrics(self) -> Iterator[tuple[int, str, float]]:
        for epoch in self.history.epochs:
            for name, number in epoch.items():
                if name not in ("epoch", "step"):
                    yield int(epoch["step"]), name, number
        for name, numbers in self.history.scalars.items():
            if name.startswith(_EVALUATION):
                yield from ((step, name, number) for step, number in numbers.items())

    def logged_series(self) -> dict[str, dict[int, float]]:
        """Scalars that the program has logged, by name and step."""
        scalars = self.history.scalars.items()
        return {name: each for name, each in scalars if not name.startswith(_EVALUATION)}

    def spans(self) -> list[Span]:
        """The time line of the processes of the last start."""
        return [span for process in self.processes for span in self._spans_of(process)]

    def _spans_of(self, process: ProcessTimes) -> Iterator[Span]:
        track, start = f"rank {process.rank}", self.start
        end = process.ended or self.now
        ready = end if process.ready is None else process.ready
        yield Span(track, "set up", process.started - start, ready - process.started)
        evaluations = self.evaluations if process.rank == 0 else []
        for begin, stop in evaluations:
            if ready <= begin < end:
                yield Span(track, "train", ready - start, begin - ready)
                yield Span(track, "evaluate", begin - start, stop - begin)
                ready = stop
        yield Span(track, "train", ready - start, max(0.0, end - ready))
