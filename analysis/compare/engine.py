"""Comparison of backends: plans the cells, makes their runs one at a time and stores the results."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from isotrain.analysis.compare import store, summary
from isotrain.analysis.compare.measurement.grid import (
    PlannedCell,
    RunOrder,
    available_backends,
    equal_threads,
    max_processes_per_host,
    planned_cells,
    reason_of,
)
from isotrain.analysis.compare.measurement.runner import Runner
from isotrain.analysis.compare.records import Cell, Verdict
from isotrain.analysis.compare.result import Comparison, read_comparison
from isotrain.analysis.compare.settings import (
    CompareRequest,
    CompareSettings,
    run_seconds,
)
from isotrain.analysis.compare.verdict import decide
from isotrain.core.contracts.launcher import LOCAL, Allocation
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import PlanError, did_you_mean, unknown_name
from isotrain.core.json_records import value
from isotrain.core.launching.local_launcher import refuse_nesting
from isotrain.core.launching.scheduler.scheduler_launcher import require_starts_runs
from isotrain.core.planning.cluster_environment import require_single_process
from isotrain.core.planning.launcher_support import require_startable
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.reporting.status import OnProgress
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.sections import StrategyChoice
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware

_LOAD_SECONDS = 0.5
_NOT_RUN = "not run yet"
_NO_TIME = "not run: the time budget was used up before"


class ComparisonEngine:
    """A comparison in progress: plans cells, makes their runs and stores every result at once.

    Attributes:
        comparison: Results so far.
        folder: Output folder.
        report: Path of the HTML report; None until it is written.
    """

    def __init__(self, spec: SpecLike, request: CompareRequest, on_progress: OnProgress) -> None:
        """Plans every cell; starts nothing.

        Raises:
            SpecError: The spec is wrong.
            PlanError: The options of the request contradict each other, the spec or the launcher.
        """
        refuse_nesting()
        require_single_process("compare")
        self.report: Path | None = None
        self._on_progress = on_progress
        loaded = load_spec(spec)
        allocation = _allocation(request, loaded)
        slots = 1 if allocation is None else allocation.slots
        self._runner = Runner(request.interpreters, request.launcher, slots)
        backends = _backends(request, loaded)
        strategies = _strategies(request, loaded)
        counts = _replicas(request)
        self._spec = equal_threads(loaded, max_processes_per_host(counts, allocation))
        self._old = read_comparison(Path(request.against)) if request.against else None
        planned = planned_cells(
            self._spec,
            backends=backends,
            replicas=counts,
            strategies=strategies,
            runner=self._runner,
        )
        self._targets = {target.name: target for target in planned}
        self._settings = _settings(request, self._spec, backends, strategies, planned)
        self._reference = request.reference
        self.comparison = self._new_comparison()
        self.folder = self._opened(request)
        self._made = 1 + max(
            (r.order for c in self.comparison.cells for r in c.repeats), default=-1
        )

    def _new_comparison(self) -> Comparison:
        if self._reference is not None and self._reference not in self._targets:
            raise PlanError("--reference: " + unknown_name("cell", self._reference, self._targets))
        return Comparison(
            name=self._spec.name,
            spec=self._spec.to_dict(),
            reference=self._reference,
            created=time.time(),
            finished=False,
            machine=dict(hardware.describe()),
            settings=asdict(self._settings),
            cells=[_empty(target) for target in self._targets.values()],
            verdict=Verdict(None, [], ""),
        )

    def _opened(self, request: CompareRequest) -> Path:
        """Creates the output folder, or takes over the runs stored in that of `resume`."""
        if request.resume is None:
            return store.new_folder(self._spec.name, request.output)
        folder = Path(request.resume).resolve()
        stored = read_comparison(folder)
        store.check_same(stored, self.comparison, folder)
        spent = value(float, stored.settings.get("spent_s"), f"{folder}: settings.spent_s")
        self._settings = replace(self._settings, spent_s=spent)
        cells = [_taken_up(old, new) for old, new in zip(stored.cells, self._cells, strict=True)]
        self.comparison = replace(self.comparison, created=stored.created, cells=cells)
        return folder

    @property
    def _cells(self) -> list[Cell]:
        return self.comparison.cells

    def run(self) -> Comparison:
        """Makes all remaining runs; the folder is up to date after each of them, however this ends."""
        self._save()
        try:
            while (cell := self._next()) is not None:
                self._measure(cell)
                self._save()
            self._settle()
        finally:
            self.report = store.publish(self.comparison, self.folder)
        return self.comparison

    def _next(self) -> Cell | None:
        settings = self._settings
        order = RunOrder(settings.repeats, settings.seed, settings.time_budget_s)
        name = order.next_cell(self._runnable(), self.comparison.verdict.tied, settings.spent_s)
        return None if name is None else self.comparison.cell(name)

    def _measure(self, cell: Cell) -> None:
        """Makes one run of a cell and records its result or its failure."""
        target, others = self._targets[cell.name], self._others_cores()
        began, start = time.time(), time.monotonic()
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", cell.name)
        folder = self.folder / store.RUNS_FOLDER / f"{self._made:03}-{slug}"
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
        try:
            raw = self._runner.run(
                self._spec.with_strategy(target.strategy),
                target.backend,
                target.replicas,
                self._settings.measurement(evaluate=not cell.repeats),
                folder,
            )
        except Exception as error:  # third-party backends raise anything; other cells go on
            measured = replace(cell, status="failed", reason=reason_of(error))
            seconds = time.monotonic() - start
        else:
            shutil.rmtree(folder, ignore_errors=True)
            seconds = time.monotonic() - start
            measured = summary.with_run(
                cell, raw, summary.RunTimes(self._made, began, seconds, others)
            )
        self._note(measured, seconds)

    def _others_cores(self) -> float | None:
        """Cores that other programs of this machine keep busy; None if runs are on other hosts."""
        return None if self._settings.launcher else hardware.busy_cores(_LOAD_SECONDS)

    def _note(self, measured: Cell, seconds: float) -> None:
        self._made += 1
        self._settings = replace(self._settings, spent_s=self._settings.spent_s + seconds)
        cells = [measured if cell.name == measured.name else cell for cell in self._cells]
        self.comparison = replace(self.comparison, cells=cells, settings=asdict(self._settings))
        self._on_progress(
            f"{self._count()} {measured.name}: {_outcome(measured)} ({seconds:.1f} s)"
        )

    def _count(self) -> str:
        planned = self._settings.repeats * sum(t.refusal is None for t in self._targets.values())
        return f"[{self._made}/{max(planned, self._made)}]"

    def _save(self) -> None:
        """Recomputes estimates, verdict and changes from all runs, and writes `comparison.json`."""
        seed, reference = self._settings.seed, self._reference
        if reference is None:
            finished = (cell.name for cell in self._cells if cell.status == "finished")
            reference = next(finished, None)
        cells = summary.summarize(self._cells, reference, seed)
        verdict = decide(cells)
        updated = replace(self.comparison, reference=reference, cells=cells, verdict=verdict)
        if self._old is not None:
            margin = self._settings.margin
            changes = summary.changes_since(self._old, updated, margin=margin, seed=seed)
            updated = replace(updated, changes=changes)
        self.comparison = updated
        store.write(self.comparison, self.folder)

    def _settle(self) -> None:
        """Sets `finished`, and the reason of cells that the time budget left without a run."""
        cells = [replace(c, reason=_NO_TIME) if c.reason == _NOT_RUN else c for c in self._cells]
        repeats = self._settings.repeats
        complete = all(c.status == "failed" or len(c.repeats) >= repeats for c in self._runnable())
        self.comparison = replace(self.comparison, cells=cells, finished=complete)
        store.write(self.comparison, self.folder)

    def _runnable(self) -> list[Cell]:
        return [cell for cell in self._cells if self._targets[cell.name].refusal is None]


def _allocation(request: CompareRequest, spec: TrainingSpec) -> Allocation | None:
    """The launcher's allocation of hosts and slots; None: this machine.

    Raises:
        PlanError: The launcher cannot start runs from here, or only joins processes that something
            else started, or its options contradict each other or the allocation.
    """
    launcher = plugin_manager(spec.plugins).launcher(
        request.launcher.name, request.launcher.options
    )
    require_startable(launcher)
    require_starts_runs(launcher)
    return launcher.allocation()


def _replicas(request: CompareRequest) -> Sequence[int] | None:
    """Numbers of replicas to measure; None: as many as the launcher's allocation has room for."""
    if request.replicas is None and request.launcher.name == LOCAL:
        return (1,)
    return request.replicas


def _backends(request: CompareRequest, spec: TrainingSpec) -> list[str]:
    host = plugin_manager(spec.plugins)
    if request.backends is None:
        _require_compared(request.interpreters, host.backends.names())
        return available_backends(spec, host, request.interpreters)
    names = {split_backend(backend)[0] for backend in request.backends}
    _require_compared(request.interpreters, [*request.backends, *names])
    other_interpreters = {split_backend(backend)[0] for backend in request.interpreters}
    for name in sorted(names - other_interpreters):
        if name not in host.backends.names():
            raise PlanError(unknown_name("backend", name, host.backends.names()))
    return list(request.backends)


def _require_compared(interpreters: Iterable[str], backends: Collection[str]) -> None:
    for backend in interpreters:
        if backend not in backends:
            suggestion = did_you_mean(backend, backends)
            raise PlanError(
                f"--interpreter {backend}=...: that backend is not compared.{suggestion}"
            )


def _strategies(request: CompareRequest, spec: TrainingSpec) -> list[StrategyChoice]:
    choices = [StrategyChoice.of(each) for each in request.strategies or [spec.strategy.name]]
    registered = plugin_manager(spec.plugins).strategies.names()
    for choice in choices:
        if choice.name not in registered:
            raise PlanError(unknown_name("strategy", choice.name, registered))
    return choices


def _settings(
    request: CompareRequest,
    spec: TrainingSpec,
    backends: Sequence[str],
    strategies: Sequence[StrategyChoice],
    planned: Sequence[PlannedCell],
) -> CompareSettings:
    assert spec.threads is not None
    return CompareSettings(
        backends=backends,
        replicas=list(request.replicas or dict.fromkeys(each.replicas for each in planned)),
        strategies=[each.label for each in strategies],
        interpreters=dict(request.interpreters),
        launcher=None if request.launcher.name == LOCAL else asdict(request.launcher),
        repeats=request.repeats,
        time_budget_s=request.time_budget,
        seed=request.seed,
        steps=request.steps,
        threads=spec.threads,
        margin=request.margin,
        run_seconds=run_seconds(request, len(planned)),
    )


def _empty(target: PlannedCell) -> Cell:
    """A cell without runs: `failed` where planning failed, else `skipped` until its first run."""
    is_failed = target.refusal is not None and not target.unsupported
    return Cell(
        name=target.name,
        backend=target.backend_name,
        collective=_collective(target),
        replicas=target.replicas,
        strategy=target.strategy.label,
        python=target.python,
        status="failed" if is_failed else "skipped",
        reason=target.refusal or _NOT_RUN,
        plan=dict(target.plan),
    )


def _collective(target: PlannedCell) -> str:
    requested = split_backend(target.backend)[1] or "auto"
    return str(target.plan.get("collective", requested))


def _taken_up(stored: Cell, new: Cell) -> Cell:
    """The stored cell if it has runs or failed in one; otherwise the newly planned cell."""
    return stored if stored.repeats or (stored.status == "failed" and stored.plan) else new


def _outcome(cell: Cell) -> str:
    if cell.status == "failed":
        return "failed: " + str(cell.reason).strip().splitlines()[0]
    last = cell.repeats[-1]
    rate = sum(last.block_samples) / sum(last.block_seconds)
    return f"{rate:,.0f} samples/s"
