"""A launcher that has an engine start the same command on every rank."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.events import OnEvent
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.launcher import Allocation, Launcher, RankCommand, Submission
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import PlanError
from isotrain.core.launching.scheduler.scheduler_run import rank_command, run_on_scheduler
from isotrain.core.plugins import selection
from isotrain.core.spec.training_spec import TrainingSpec


class SchedulerLauncher(Launcher):
    """Has an engine start the same command on every rank; each finds its place there by itself."""

    @property
    def starts(self) -> bool:
        """Whether it starts runs with its options; else it writes what its engine is to be given."""
        return True

    @abstractmethod
    def allocation(self) -> Allocation:
        """What the engine gives: what this process was allocated, or what the options ask for.

        Raises:
            PlanError: The options contradict each other or what there is.
        """

    @abstractmethod
    def submission(self, command: RankCommand) -> Submission:
        """What is given to the engine for one run; starts nothing.

        Args:
            command: What every rank does.

        Raises:
            PlanError: As `allocation`.
        """

    def refuses(self, adapter: Adapter, processes: int) -> str | None:
        return adapter.why_not_externally_started() if processes > 1 else None

    def launch(
        self, job: Job, directory: Path, *, on_event: OnEvent, first_port: int | None = None
    ) -> list[Any]:
        if first_port is not None:
            raise PlanError(
                f"launcher {self.name!r}: --port (port= in Python) is of this machine, and ranks choose"
                " ports on theirs. Leave it out."
            )
        return run_on_scheduler(self.name, self.submission, job, directory, on_event)


def require_submittable(launcher: Launcher, spec: TrainingSpec, plan: Plan) -> None:
    """Refuses what an engine cannot be given, and a launcher that starts nothing by itself.

    Args:
        launcher: That is to start runs, one after the other.
        spec: What to train.
        plan: How.

    Raises:
        PlanError: It is such.
    """
    require_starts_runs(launcher)
    if isinstance(launcher, SchedulerLauncher):
        plugins = selection.for_workers(selection.current())
        launcher.submission(rank_command(spec, plan, plugins, Path("run").absolute(), None))


def require_starts_runs(launcher: Launcher) -> None:
    """Refuses a launcher that starts nothing by itself.

    Raises:
        PlanError: It is such.
    """
    if isinstance(launcher, SchedulerLauncher) and not launcher.starts:
        raise PlanError(
            f"launcher {launcher.name!r}: with these options isotrain writes what the engine is given, and"
            " starts nothing by itself. `isotrain run --dry-run` writes it; leave them out here."
        )
