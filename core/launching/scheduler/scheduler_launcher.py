"""Base class of launchers that have a scheduler or mpirun, torchrun etc. start one command on every rank."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.events import OnEvent
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.launcher import Allocation, Launcher, RankCommand, Submission
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import PlanError
from isotrain.core.launching.scheduler.scheduler_run import rank_command, run_on_scheduler
from isotrain.core.plugins import selection
from isotrain.core.spec.training_spec import TrainingSpec


class SchedulerLauncher(Launcher):
    """Launcher that has a scheduler start the same command on every rank.

    Each rank finds its rank and peers by its cluster environment.
    """

    @property
    def starts(self) -> bool:
        """Whether it starts runs with its options; otherwise it only writes the files to submit."""
        return True

    @abstractmethod
    def allocation(self) -> Allocation:
        """The hosts and slots allocated to this process, or requested by the options.

        Raises:
            PlanError: The options contradict each other or the allocation.
        """

    @abstractmethod
    def submission(self, command: RankCommand) -> Submission:
        """Builds the submission of one run (commands, files, environment); starts nothing.

        Args:
            command: Command of every rank.

        Raises:
            PlanError: See `allocation`.
        """

    def replacement(self, command: RankCommand) -> Submission | None:
        """Builds the submission of a process that comes in place of a lost one, in an elastic run.

        Args:
            command: Command of that process alone; see `RankCommand.joins`.

        Returns:
            The submission; None: lost processes are not replaced.
        """
        return None

    def refuses(self, adapter: Adapter, processes: int) -> str | None:
        return adapter.why_not_externally_started() if processes > 1 else None

    def launch(
        self, job: Job, directory: Path, *, on_event: OnEvent, first_port: int | None = None
    ) -> list[Any]:
        if first_port is not None:
            raise PlanError(
                f"launcher {self.name!r}: --port (port= in Python) is for this machine, and ranks on other"
                " hosts choose their ports. Leave it out."
            )
        return run_on_scheduler(self, job, directory, on_event)


def require_submittable(launcher: Launcher, spec: TrainingSpec, plan: Plan) -> None:
    """Checks that a launcher starts runs itself, and that it accepts this spec and plan.

    Args:
        launcher: Launcher of the runs.
        spec: Training spec.
        plan: Plan of the runs.

    Raises:
        PlanError: It does not.
    """
    require_starts_runs(launcher)
    if isinstance(launcher, SchedulerLauncher):
        plugins = selection.for_workers(selection.current())
        launcher.submission(rank_command(spec, plan, plugins, Path("run").absolute(), None))


def require_starts_runs(launcher: Launcher) -> None:
    """Checks that a launcher starts runs itself.

    Raises:
        PlanError: It only writes the files to submit.
    """
    if isinstance(launcher, SchedulerLauncher) and not launcher.starts:
        raise PlanError(
            f"launcher {launcher.name!r}: with these options isotrain only writes the files to submit, and"
            " starts nothing. `isotrain run --dry-run` writes them; leave the options out here."
        )
