"""`isotrain.compare`, the Python interface of comparisons."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.analysis.compare.engine import ComparisonEngine
from isotrain.analysis.compare.result import Comparison
from isotrain.analysis.compare.settings import REPEATS, STEPS, CompareRequest
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.reporting.status import OnProgress, default_progress, waiting
from isotrain.core.spec.loading import SpecLike
from isotrain.core.spec.sections import StrategyLike, strategy_list


def compare(
    spec: SpecLike,
    *,
    backends: str | Sequence[str] | None = None,
    replicas: int | Sequence[int] | None = None,
    strategies: StrategyLike | Sequence[StrategyLike] | None = None,
    repeats: int = REPEATS,
    time_budget: float | None = None,
    run_limit: float | None = None,
    seed: int = 0,
    steps: int = STEPS,
    reference: str | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | None = None,
    margin: float = 0.0,
    interpreters: Mapping[str, str] | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    quiet: bool = False,
) -> Comparison:
    """Measures backends against each other, on this machine or where a launcher starts them.

    Every run is made in new processes; `docs/compare.md` explains every figure.

    Args:
        spec: Training spec, as for `isotrain.run`.
        backends: Backends to compare, one or several, each `NAME` or `NAME:COLLECTIVE`; left out: all
            that are available.
        replicas: Numbers of replicas to measure each backend with, one or several; left out: 1, or as many
            as the launcher's allocation has room for.
        strategies: Strategies to measure, one or several, each a name or
            `{"name": ..., "options": {...}}`; left out: the spec's strategy.
        repeats: Runs of each cell; at least three are needed to estimate how runs vary.
        time_budget: Time budget of all runs in seconds; after the first `repeats`, further runs go to
            the cells that cannot be told from the fastest yet.
        run_limit: Limit in seconds of the timed steps of a run that does not become steady; left out:
            60, or less with a time budget.
        seed: Seed of the run order and of the bootstrap intervals.
        steps: Number of first training steps whose losses are compared.
        reference: Name of the cell that losses and plans are compared with; left out: the first
            that finishes.
        output: New or empty folder for the results; left out: `comparisons/<name>-<time>`.
        resume: Folder of a comparison to continue; instead of `output`.
        against: Folder or file of an earlier comparison; fills `changes`.
        margin: Fraction by which throughput must fall below that in `against` to count as slower.
        interpreters: Path of the Python interpreter that has a backend, by backend.
        launcher: Launcher that starts every run, as for `isotrain.run`.
        launcher_options: Options of the launcher, as for `isotrain.run`.
        on_progress: Callback that receives one line of text after each run; left out: the lines are shown
            in a terminal or notebook.
        quiet: Whether to show nothing meanwhile, also in a terminal or notebook.

    Returns:
        All results, failed cells included. The same is written to `output` after every run, so that
        an interrupted call loses nothing.

    Raises:
        SpecError: The spec is wrong.
        PlanError: The arguments contradict each other, the spec or the launcher.
    """
    request = CompareRequest(
        backends=[backends] if isinstance(backends, str) else backends,
        replicas=[replicas] if isinstance(replicas, int) else replicas,
        strategies=strategy_list(strategies),
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
    engine = ComparisonEngine(spec, request, on_progress or default_progress(quiet))
    with waiting("comparing", quiet=quiet or on_progress is not None):
        return engine.run()
