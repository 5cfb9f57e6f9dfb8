"""Planning and execution of a comparison's runs, in this interpreter or in another one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotrain.analysis.compare.measurement.measure import Measurement
from isotrain.core.contracts.events import Event, Ready
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError, error_named
from isotrain.core.launching.forkserver.pool import FORK_SERVERS
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.launching.run_job import run_job
from isotrain.core.launching.scheduler.scheduler_launcher import require_submittable
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.serialization import as_plain
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.subprocess_call import (
    END_SECONDS,
    ChildEndedError,
    ChildProcess,
    ChildRaisedError,
)
from isotrain.core.system.version import VERSION

_DO = "isotrain.analysis.compare.measurement.runner_main:run_task"


class Runner:
    """Plans and makes runs, each in the interpreter of its backend, all with one launcher.

    Attributes:
        slots: Number of process slots in the launcher's allocation; 1 without an allocation.
    """

    def __init__(
        self,
        interpreters: Mapping[str, str],
        launcher: LauncherChoice | None = None,
        slots: int = 1,
    ) -> None:
        """Validates the interpreters.

        Raises:
            PlanError: An interpreter is not an executable file.
        """
        for backend, python in interpreters.items():
            if not os.access(python, os.X_OK) or os.path.isdir(python):
                raise PlanError(
                    f"--interpreter {backend}={python}: there is no program of that path. Expected"
                    " the interpreter of another environment, such as /home/me/env/bin/python."
                )
        self._interpreters = dict(interpreters)
        self._launcher = launcher or LauncherChoice()
        self.slots = slots

    def interpreter_of(self, backend: str) -> str | None:
        """The path of a backend's interpreter; None: this one."""
        exact = self._interpreters.get(backend)
        return exact or self._interpreters.get(split_backend(backend)[0])

    def plan(self, spec: TrainingSpec, backend: str, replicas: int | None) -> dict[str, Any]:
        """Plans a cell's run; `replicas=None` fills the launcher's allocation.

        Raises:
            IsotrainError: The run cannot be planned.
        """
        python = self.interpreter_of(backend)
        if python is None:
            return plan_here(spec, backend, replicas, self._launcher)
        task = {"spec": as_plain(spec), "backend": backend, "replicas": replicas}
        with tempfile.TemporaryDirectory(prefix="isotrain-compare-") as folder:
            return _ask(python, {"do": "plan", **task}, Path(folder))

    def run(
        self,
        spec: TrainingSpec,
        backend: str,
        replicas: int,
        measurement: Measurement,
        folder: Path,
    ) -> dict[str, Any]:
        """Makes one run in new processes; forked ones get a fork server of their own.

        Returns:
            `started` (monotonic seconds), and `ranks`: what each process returned.

        Raises:
            IsotrainError: The run failed.
        """
        python = self.interpreter_of(backend)
        if python is None:
            return run_here(spec, backend, replicas, measurement, folder, self._launcher)
        folder.mkdir(parents=True, exist_ok=True)
        task = {
            "spec": as_plain(spec),
            "backend": backend,
            "replicas": replicas,
            "measurement": vars(measurement),
        }
        return _ask(python, {"do": "run", **task}, folder)


def plan_here(
    spec: TrainingSpec,
    backend: str,
    replicas: int | None,
    launcher: LauncherChoice | None = None,
) -> dict[str, Any]:
    """Plans a run in this interpreter, as `Runner.plan`."""
    cast = ResolvedSpec(spec, plugin_manager(spec.plugins))
    plan = make_plan(cast, backend=backend, replicas=replicas, launcher=launcher)
    require_submittable(cast.plugins.launcher(plan.launcher, plan.launcher_options), spec, plan)
    return plan.to_dict()


def run_here(
    spec: TrainingSpec,
    backend: str,
    replicas: int,
    measurement: Measurement,
    folder: Path,
    launcher: LauncherChoice | None = None,
) -> dict[str, Any]:
    """Makes a run in this interpreter, as `Runner.run`."""
    host = plugin_manager(spec.plugins)
    plan = make_plan(
        ResolvedSpec(spec, host), backend=backend, replicas=replicas, launcher=launcher
    )
    directory = RunDirectory.create(spec.name, folder)
    ready_time = _ReadyTime()
    with FORK_SERVERS.only_new():  # measure the start-up of a new program
        started = time.monotonic()
        ranks = run_job(measurement, spec, plan, host, directory, on_event=ready_time)
    return {"started": started, "ranks": ready_time.by_this_clock(ranks, plan)}


class _ReadyTime:
    """Event callback that records when rank 0 was ready, by this machine's clock and by rank 0's."""

    def __init__(self) -> None:
        self._ready: tuple[float, float] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Ready) and event.rank == 0:
            self._ready = time.monotonic(), event.time

    def by_this_clock(self, ranks: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
        """The returned values with the end of the first step converted to this machine's clock.

        Processes of a launcher, which may be on other hosts, all get the time of rank 0.

        Raises:
            RunFailedError: No ready event of rank 0 arrived, so that its clock cannot be converted.
        """
        if plan.launcher == LOCAL:
            return ranks
        if self._ready is None:
            raise RunFailedError(
                f"launcher {plan.launcher!r}: rank 0 did not say when it was ready, so when its first step"
                " ended is not known by the clock of this machine."
            )
        here, there = self._ready
        at = here + ranks[0]["first_step_time"] - there
        return [{**rank, "first_step_at": at} for rank in ranks]


def _ask(python: str, task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Runs a task in another interpreter; re-raises its error here."""
    call = {**task, "folder": str(folder), "version": VERSION}
    process = ChildProcess(_DO, call, folder / "launcher", python=python)
    try:
        process.wait()
    finally:
        process.end(END_SECONDS)
    try:
        result: dict[str, Any] = process.answer()
    except ChildRaisedError as error:
        text = f"{error.message} (in {python})"
        raise error_named(error.kind, text, IsotrainError) from None
    except ChildEndedError as error:
        raise IsotrainError(_no_answer(error, python)) from None
    return result


def _no_answer(error: ChildEndedError, python: str) -> str:
    hint = ""
    if "No module named" in error.output and "isotrain" in error.output:
        hint = f" Install isotrain {VERSION} there: {python} -m pip install isotrain."
    return f"{python} ended {error.how} before it answered; its output: {error.output}.{hint}"
