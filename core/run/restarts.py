"""Restarts of a run after failures: from which checkpoint, and with which plan."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.events import Event, MembersChanged, Restarted, Steps
from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.contracts.plan import Plan, backend_label
from isotrain.core.errors import PlanError, RunFailedError
from isotrain.core.launching.run_directory.run_directory import RunDirectory, checkpoint_folder
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.training_spec import TrainingSpec

if TYPE_CHECKING:
    from isotrain.core.checkpoints.checkpoint import Checkpoint


class Restarts:
    """Plan and checkpoint of the next attempt of a run, and records of its restarts so far.

    Attributes:
        plan: Plan of the next attempt.
        location: Checkpoint from which it starts; None: from the initial weights.
        records: One record for each restart; see `RunResult`.
        steps_done: Number of steps that the present attempt has reported.
    """

    def __init__(
        self,
        resolved: ResolvedSpec,
        plan: Plan,
        directory: RunDirectory,
        checkpoint: Checkpoint | None,
        limit: int,
    ) -> None:
        """Prepares the first attempt.

        Args:
            resolved: Resolved spec of the run.
            plan: Plan of the first attempt.
            directory: Run directory.
            checkpoint: Checkpoint from which the first attempt starts; None: none.
            limit: Maximum number of restarts.
        """
        self.plan = plan
        self.location = None if checkpoint is None else checkpoint.location
        self.records: list[dict[str, Any]] = []
        self._resolved = resolved
        self._directory = directory
        self._first_checkpoint = checkpoint
        self._limit = limit
        self.steps_done = 0

    def note_steps(self, event: Event) -> None:
        """Keeps how far the present attempt has come."""
        if isinstance(event, Steps):
            self.steps_done = event.first + len(event.losses)
        elif isinstance(event, MembersChanged):
            self.steps_done = min(self.steps_done, event.done)

    def restart(self, failure: RunFailedError) -> Restarted | None:
        """Prepares another attempt from the newest checkpoint; None if none is left.

        Where a host was lost, or an earlier restart began at the same step, the plan gets fewer replicas if
        the spec allows that.
        """
        if len(self.records) >= self._limit or self._directory.removed():
            return None
        spec = self._resolved.spec
        checkpoint = _newest(spec, self._directory) or self._first_checkpoint
        step, self.location = 0, None
        if checkpoint is not None:
            step, self.location = checkpoint.step, checkpoint.location
        is_stuck = any(record["from_step"] == step for record in self.records)
        if failure.lost_host is not None or is_stuck:
            self.plan = _smaller(self._resolved, self.plan, failure.lost_host)
        reached = self.steps_done if failure.steps_done is None else failure.steps_done
        self.steps_done = 0
        facts = {
            "after_step": max(reached, step),
            "from_step": step,
            "replicas": self.plan.replicas,
        }
        self.records.append({"failure": str(failure).partition("\n")[0], **facts})
        return Restarted(time=time.time(), failure=str(failure), **facts)


def _newest(spec: TrainingSpec, directory: RunDirectory) -> Checkpoint | None:
    """The newest complete checkpoint of a run."""
    from isotrain.core.checkpoints.folder import CheckpointFolder  # it imports NumPy

    return CheckpointFolder(checkpoint_folder(spec, directory.path)).newest()


def _smaller(resolved: ResolvedSpec, plan: Plan, lost_host: str | None) -> Plan:
    """A plan without a lost host, or with fewer replicas; the same plan if the spec allows no smaller one."""
    least = resolved.spec.min_replicas
    if least is None:
        return plan
    try:
        smaller = (
            _with_fewer_replicas(resolved, plan)
            if lost_host is None
            else _without_host(resolved, plan, lost_host)
        )
    except PlanError:
        return plan
    return smaller if smaller.replicas >= least else plan


def _requested_backend(plan: Plan) -> str:
    return backend_label(plan.backend, plan.requested_collective)


def _without_host(resolved: ResolvedSpec, plan: Plan, lost_host: str) -> Plan:
    options = plan.launcher_options or {}
    changes = resolved.plugins.launcher(plan.launcher, options).without(lost_host)
    launcher = LauncherChoice(plan.launcher, {**options, **changes})
    return make_plan(resolved, backend=_requested_backend(plan), replicas=None, launcher=launcher)


def _with_fewer_replicas(resolved: ResolvedSpec, plan: Plan) -> Plan:
    """The plan with the most replicas below those of a plan: a strategy may not take every number."""
    launcher = LauncherChoice(plan.launcher, plan.launcher_options or {})
    for count in range(plan.replicas - 1, 1, -1):
        with contextlib.suppress(PlanError):
            return make_plan(
                resolved, backend=_requested_backend(plan), replicas=count, launcher=launcher
            )
    return make_plan(resolved, backend=_requested_backend(plan), replicas=1, launcher=launcher)
