"""What a person calls from Python: compare."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.analysis.compare.engine import ComparisonEngine, OnProgress
from isotrain.analysis.compare.result import Comparison
from isotrain.analysis.compare.settings import REPEATS, STEPS, CompareRequest
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.spec.loading import SpecLike
from isotrain.core.spec.sections import StrategyLike


def compare(
    spec: SpecLike,
    *,
    backends: Sequence[str] | None = None,
    replicas: Sequence[int] | None = None,
    strategies: Sequence[StrategyLike] | None = None,
    repeats: int = REPEATS,
    time_budget: float | None = None,
    run_limit: float | None = None,
    seed: int = 0,
    steps: int = STEPS,
    reference: str | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    against: str | os.PathLike[str] | None = None,
    margin: float = 0.0,
    interpreters: Mapping[str, str] | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Measures backends against each other, on this machine or where a launcher starts them.

    Every run is made in new processes; `docs/compare.md` tells what each number means.

    Args:
        spec: As for `isotrain.run`.
        backends: `NAME` or `NAME:COLLECTIVE`; left out: all that can be used.
        replicas: With how many replicas each is measured; left out: 1, or as many as the hosts of the
            launcher give.
        strategies: Under which strategies, each a name or `{"name": ..., "options": {...}}`; left out:
            the spec's.
        repeats: Runs of each cell. It takes three to tell how runs differ.
        time_budget: Seconds for all runs; after the first `repeats`, runs are added where the ranking
            is open.
        run_limit: Seconds that the timed steps of one run may take, should they not become steady
            before; left out: 60, or less with a time budget.
        seed: Of the order of the runs and of the intervals.
        steps: First steps of the training whose losses are compared.
        reference: Name of the cell that losses and plans are compared with; left out: the first
            that finishes.
        output: New or empty folder for the results; left out: `comparisons/<name>-<time>`.
        resume: Go on with the comparison that `output` holds.
        against: An earlier comparison's folder or file; fills `changes`.
        margin: Share by which a cell must be slower than in `against` to be called so.
        interpreters: Backend to the path of the Python interpreter that has it.
        launcher: As for `isotrain.run`: every run goes by it.
        launcher_options: As for `isotrain.run`.
        on_progress: Called with a line after each run.

    Returns:
        All that was measured, cells that failed included. `output` has it too, and is written after
        every run: also when this call is interrupted.

    Raises:
        SpecError: The spec is wrong.
        PlanError: What is asked for does not fit together.
    """
    request = CompareRequest(
        backends=backends,
        replicas=replicas,
        strategies=strategies,
        repeats=repeats,
        time_budget=time_budget,
        run_limit=run_limit,
        seed=seed,
        steps=steps,
        reference=reference,
        output=output,
        resume=resume,
        against=against,
        margin=margin,
        interpreters=interpreters or {},
        launcher=LauncherChoice(launcher, launcher_options or {}),
    )
    return ComparisonEngine(spec, request, on_progress or _silent).run()


def _silent(line: str) -> None:
    """Shows nothing."""
