"""The request of a comparison, and the settings of its measurements."""

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
    """Arguments of `isotrain.compare`, validated; `isotrain.compare` explains each."""

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
    resume: str | os.PathLike[str] | None = None
    against: str | os.PathLike[str] | None = None
    margin: float = 0.0
    interpreters: Mapping[str, str] = field(default_factory=dict)
    launcher: LauncherChoice = field(default_factory=LauncherChoice)

    def __post_init__(self) -> None:
        """Validates the arguments.

        Raises:
            PlanError: A number is out of range, an option lacks the one it depends on, or two options
                contradict each other.
        """
        counts = [("replicas", count) for count in self.replicas or ()]
        counts += [("repeats", self.repeats), ("steps", self.steps)]
        for argument, count in counts:
            if count < 1:
                raise PlanError(f"compare: expected {argument} of 1 or more, received {count}.")
        if self.replicas is not None and not self.replicas:
            raise PlanError("compare: expected one number of replicas or more, received none.")
        for argument, seconds in (("time budget", self.time_budget), ("run limit", self.run_limit)):
            if seconds is not None and seconds <= 0:
                raise PlanError(
                    f"compare: expected a {argument} above 0 s, received {seconds:g} s."
                )
        if not 0 <= self.margin < 1:
            raise PlanError(f"compare: expected a margin from 0 to below 1, got {self.margin}.")
        if self.resume is not None and self.output is not None:
            raise PlanError("compare: --resume DIR writes to that folder: leave --output out.")
        if self.interpreters and self.launcher.name != LOCAL:
            raise PlanError(
                f"compare: --interpreter (interpreters= in Python): launcher {self.launcher.name!r} has every"
                " rank run in one interpreter, this program's or that of its image. Leave one of the two out."
            )


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison's measurements; stored in its `comparison.json`.

    Attributes:
        backends: Backends to compare, each `NAME` or `NAME:COLLECTIVE`.
        replicas: Numbers of replicas to measure.
        strategies: Strategies to measure, each `NAME[,OPTION=VALUE...]`.
        interpreters: Path of the Python interpreter, by backend; backends left out use this one.
        launcher: Launcher as `name` and `options`; None: the local launcher.
        repeats: Runs of each cell.
        time_budget_s: Time budget of all runs in seconds; None: no limit.
        seed: Seed of the run order and of the bootstrap intervals.
        steps: Number of first training steps whose losses are compared.
        threads: Compute threads of every replica.
        margin: Fraction by which throughput must fall for a cell to count as slower.
        run_seconds: Limit of the timed blocks of one run, in seconds.
        blocks: Number of steady blocks after which a run ends.
        block_seconds: Target duration of a block in seconds.
        spent_s: Duration of all runs so far in seconds.
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
        """The work that every process of a run does."""
        return Measurement(
            steps=self.steps,
            evaluate=evaluate,
            blocks=self.blocks,
            block_seconds=self.block_seconds,
            seconds=self.run_seconds,
        )


def run_seconds(request: CompareRequest, cells: int) -> float:
    """The limit of one run's timed blocks in seconds; a time budget is divided over the runs of all cells."""
    if request.run_limit is not None:
        return request.run_limit
    if request.time_budget is None:
        return _RUN_SECONDS
    share = request.time_budget / (REPEATS * max(1, cells))
    return min(_RUN_SECONDS, max(_MIN_RUN_SECONDS, share / 2))


def launcher_line(settings: Mapping[str, Any]) -> str | None:
    """The launcher in a comparison's settings as a phrase; None: the local launcher."""
    launcher = settings.get("launcher")
    if not isinstance(launcher, Mapping):
        return None
    options = ", ".join(f"{name}={value}" for name, value in launcher.get("options", {}).items())
    return f"started by launcher {launcher.get('name')}{f' ({options})' if options else ''}"
