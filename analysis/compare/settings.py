"""What a comparison is asked for, and how it measures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotrain.analysis.compare.measurement.measure import Measurement
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.errors import PlanError
from isotrain.core.spec.sections import StrategyLike

REPEATS = 3
STEPS = 20
_BLOCKS = 20
_BLOCK_SECONDS = 0.1
_RUN_SECONDS = 60.0
_MIN_RUN_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What `isotrain.compare` was asked for; see there."""

    backends: Sequence[str] | None = None
    replicas: Sequence[int] | None = None
    strategies: Sequence[StrategyLike] | None = None
    repeats: int = REPEATS
    time_budget: float | None = None
    run_limit: float | None = None
    seed: int = 0
    steps: int = STEPS
    reference: str | None = None
    output: str | os.PathLike[str] | None = None
    resume: bool = False
    against: str | os.PathLike[str] | None = None
    margin: float = 0.0
    interpreters: Mapping[str, str] = field(default_factory=dict)
    launcher: LauncherChoice = field(default_factory=LauncherChoice)

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            PlanError: One is out of its range, an option lacks the one it belongs to, or two contradict each
                other.
        """
        counts = [("replicas", count) for count in self.replicas or ()]
        counts += [("repeats", self.repeats), ("steps", self.steps)]
        for what, count in counts:
            if count < 1:
                raise PlanError(f"compare: expected {what} of 1 or more, received {count}.")
        if self.replicas is not None and not self.replicas:
            raise PlanError("compare: expected one number of replicas or more, received none.")
        for what, seconds in (("time budget", self.time_budget), ("run limit", self.run_limit)):
            if seconds is not None and seconds <= 0:
                raise PlanError(f"compare: expected a {what} above 0 s, received {seconds:g} s.")
        if not 0 <= self.margin < 1:
            raise PlanError(f"compare: expected a margin from 0 to below 1, got {self.margin}.")
        if self.resume and self.output is None:
            raise PlanError("--resume goes on with the comparison in a folder: add --output DIR.")
        if self.interpreters and self.launcher.name != LOCAL:
            raise PlanError(
                f"compare: --python (interpreters= in Python): launcher {self.launcher.name!r} has every"
                " rank run in one interpreter, this program's or that of its image. Leave one of the two out."
            )


@dataclass(frozen=True)
class CompareSettings:
    """How a comparison measures; recorded in it.

    Attributes:
        backends: `NAME` or `NAME:COLLECTIVE`.
        replicas: Numbers of them.
        strategies: `NAME[,OPTION=VALUE...]` of each.
        interpreters: Backend to the path of its interpreter.
        launcher: `name` and `options` of what starts the processes; None: the local one.
        repeats: Runs of each cell.
        time_budget_s: Seconds for all runs; None for no limit.
        seed: Of the order of the runs and of the intervals.
        steps: First steps of the training whose losses are compared.
        threads: Compute threads of every replica.
        margin: Share by which a cell must be slower than before to be called so.
        run_seconds: Limit of a run's blocks together.
        blocks: Steady blocks that end a run.
        block_seconds: About how long a block takes.
        spent_s: Seconds that all runs took so far.
    """

    backends: Sequence[str]
    replicas: Sequence[int]
    strategies: Sequence[str]
    interpreters: Mapping[str, str]
    repeats: int
    time_budget_s: float | None
    seed: int
    steps: int
    threads: int
    margin: float
    run_seconds: float
    launcher: Mapping[str, Any] | None = None
    blocks: int = _BLOCKS
    block_seconds: float = _BLOCK_SECONDS
    spent_s: float = 0.0

    def measurement(self, *, evaluate: bool) -> Measurement:
        """What each process of a run does."""
        return Measurement(
            steps=self.steps,
            evaluate=evaluate,
            blocks=self.blocks,
            block_seconds=self.block_seconds,
            seconds=self.run_seconds,
        )


def run_seconds(request: CompareRequest, cells: int) -> float:
    """The limit of one run's blocks: with a time budget, no run may use up what others need."""
    if request.run_limit is not None:
        return request.run_limit
    if request.time_budget is None:
        return _RUN_SECONDS
    share = request.time_budget / (REPEATS * max(1, cells))
    return min(_RUN_SECONDS, max(_MIN_RUN_SECONDS, share / 2))


def launcher_line(settings: Mapping[str, Any]) -> str | None:
    """What has started all runs of a comparison, in words; None: the local launcher.

    Args:
        settings: As they were recorded.
    """
    chosen = settings.get("launcher")
    if not isinstance(chosen, Mapping):
        return None
    options = ", ".join(f"{name}={value}" for name, value in chosen.get("options", {}).items())
    return f"started by launcher {chosen.get('name')}{f' ({options})' if options else ''}"
