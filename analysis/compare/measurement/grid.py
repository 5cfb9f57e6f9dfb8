"""The grid of a comparison (backends, replicas, strategies), and the order in which its cells run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isotrain.analysis.compare.measurement.runner import Runner
from isotrain.analysis.compare.records import Cell
from isotrain.core.contracts.launcher import Allocation
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, PlanError, UnsupportedError
from isotrain.core.planning.backend_choice import backends_for
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.spec.sections import StrategyChoice
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware


@dataclass(frozen=True)
class PlannedCell:
    """One cell to measure.

    Attributes:
        name: Cell name, as in `Cell`.
        backend: Backend as requested, `NAME` or `NAME:COLLECTIVE`.
        replicas: Number of replicas.
        strategy: Strategy of the run.
        python: Path of the interpreter; None: this one.
        plan: Plan as plain values; empty if planning failed.
        refusal: Error of the planning; None if the cell can run.
        unsupported: Whether the error says that the backend does not support the cell.
    """

    name: str
    backend: str
    replicas: int
    strategy: StrategyChoice
    python: str | None
    plan: Mapping[str, Any] = field(default_factory=dict)
    refusal: str | None = None
    unsupported: bool = False

    @property
    def backend_name(self) -> str:
        """The backend without its collective."""
        return split_backend(self.backend)[0]


def planned_cells(
    spec: TrainingSpec,
    *,
    backends: Sequence[str],
    replicas: Sequence[int] | None,
    strategies: Sequence[StrategyChoice],
    runner: Runner,
) -> list[PlannedCell]:
    """Plans all cells in the requested order, and merges equivalent ones; see `Runner.plan` for None."""
    cells: dict[tuple[Any, ...], PlannedCell] = {}
    for strategy in strategies:
        for backend in backends:
            for count in replicas or (None,):
                target = _planned(spec, backend, count, strategy, runner)
                if len(strategies) > 1:
                    target = replace(target, name=f"{target.name} {strategy.label}")
                cells.setdefault(_identity(target), target)
    return list(cells.values())


def _identity(target: PlannedCell) -> tuple[Any, ...]:
    collective = target.plan.get("collective", target.backend)
    return target.backend_name, collective, target.replicas, target.strategy.label


def _planned(
    spec: TrainingSpec,
    backend: str,
    replicas: int | None,
    strategy: StrategyChoice,
    runner: Runner,
) -> PlannedCell:
    cell_spec = spec.with_strategy(strategy)
    python = runner.interpreter_of(backend)
    plan: Mapping[str, Any] = {}
    refusal = None
    unsupported = False
    try:
        plan = runner.plan(cell_spec, backend, replicas)
    except UnsupportedError as error:
        refusal, unsupported = str(error), True
    except Exception as error:  # third-party backends raise anything; other cells go on
        refusal = reason_of(error)
    count = replicas or plan.get("replicas", runner.slots)
    name = f"{backend}@{count}"
    return PlannedCell(name, backend, count, strategy, python, plan, refusal, unsupported)


def reason_of(error: Exception) -> str:
    """The reason of a failed cell; errors other than isotrain's include their type."""
    return str(error) if isinstance(error, IsotrainError) else f"{type(error).__name__}: {error}"


def available_backends(
    spec: TrainingSpec, host: PluginManager, interpreters: Mapping[str, str]
) -> list[str]:
    """The backends for the spec's model that are available here or have an interpreter in `interpreters`.

    Raises:
        PlanError: No backend is available.
    """
    backends = backends_for(spec, host)
    names = [name for name, each in backends.items() if each.available or name in interpreters]
    if not names:
        raise PlanError(
            "compare: no backend can be used here; `isotrain doctor` tells why. Install one, or name"
            " an interpreter that has one with --interpreter BACKEND=PATH."
        )
    return names


def equal_threads(spec: TrainingSpec, processes: int) -> TrainingSpec:
    """Gives every replica the same number of threads, unless the spec says how many."""
    if spec.threads is not None:
        return spec
    return spec.replace(threads=max(1, hardware.cores() // processes))


def max_processes_per_host(replicas: Sequence[int] | None, allocation: Allocation | None) -> int:
    """The largest number of processes of any cell on one host of the allocation, or on this machine."""
    if allocation is None or allocation.slots == 1:  # a single process may have all of them
        return max(replicas or (1,))
    return max(share.slots for share in allocation.host_slots)


@dataclass(frozen=True)
class RunOrder:
    """Order of the runs of a comparison, and when to stop.

    Every cell is first run `repeats` times, in rounds: one run of each cell, in an order drawn anew for
    every round, so that no cell always runs first or always after the same one (randomised block design).
    With a time budget, runs are then added to the cells whose ranking is open, until it is decided or the
    time is used up.

    Attributes:
        repeats: Runs of each cell before any cell gets more.
        seed: Seed of the order.
        time_budget: Time budget of all runs in seconds; None: no limit, and `repeats` runs of each.
    """

    repeats: int
    seed: int
    time_budget: float | None = None

    def next_cell(
        self, cells: Sequence[Cell], open_ranking: Sequence[str], spent: float
    ) -> str | None:
        """The name of the cell to run next, after runs of `spent` seconds; None when no run is left."""
        alive = [cell for cell in cells if cell.status != "failed"]
        for cell in self._candidates(alive, open_ranking):
            if self.time_budget is None or spent + _expected(cell) < self.time_budget:
                return cell.name
        return None

    def _candidates(self, cells: Sequence[Cell], open_ranking: Sequence[str]) -> Iterator[Cell]:
        for number in range(self.repeats):
            yield from (c for c in self.round(cells, number) if len(c.repeats) == number)
        if self.time_budget is not None:
            contenders = [cell for cell in cells if cell.name in open_ranking]
            fewest = min((len(cell.repeats) for cell in contenders), default=0)
            yield from sorted(self.round(contenders, fewest), key=lambda c: len(c.repeats))

    def round(self, cells: Sequence[Cell], number: int) -> list[Cell]:
        """The cells in the pseudorandom order of a round, which depends on seed, round and names alone."""

        def drawn(cell: Cell) -> float:
            return random.Random(f"{self.seed}/{number}/{cell.name}").random()

        return sorted(cells, key=drawn)


def _expected(cell: Cell) -> float:
    """Expected duration of a cell's next run in seconds: the mean of its runs, 0 without any."""
    if not cell.repeats:
        return 0.0
    return sum(repeat.run_s for repeat in cell.repeats) / len(cell.repeats)
