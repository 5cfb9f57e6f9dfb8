"""Starting a run's processes again after a failure, from the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.events import Event, OnEvent, Restarted, Steps
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import EndedError, NotANumberError, PlanError, RunFailedError
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.loggers.dispatcher import EventDispatcher

if TYPE_CHECKING:
    from isotrain.core.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class RunRecords:
    """A run's directory, those who hear of it, and the display.

    Attributes:
        directory: Keeps all events.
        dispatcher: Event hooks and loggers.
        show: Shows an event to the person.
    """

    directory: RunDirectory
    dispatcher: EventDispatcher
    show: Callable[[Event], None]

    def on_event(self, event: Event) -> None:
        """Takes an event that the directory has already."""
        self.show(event)
        self.dispatcher.dispatch(event)

    def note(self, event: Event) -> None:
        """Takes an event that no process has told."""
        self.directory.append_event(event)
        self.on_event(event)

    def rewind(self, step: int) -> None:
        """Forgets what was told of steps from this one on: they are taken again."""
        self.directory.rewind(step)
        self.dispatcher.rewind_to(step)


Attempt = Callable[[Plan, str | None, OnEvent], list[Any]]
"""Runs all processes of a plan once, from a checkpoint or from the start; gives what they returned."""
Replan = Callable[[Plan, str | None], Plan]
"""Makes a smaller plan of one: without a host that was lost, or with fewer replicas."""


@dataclass
class RestartLoop:
    """Runs a job until it ends well, or has failed too often.

    Attributes:
        max_restarts: How often it may start again.
        folder: Where its checkpoints lie: a path or URL.
        initial_checkpoint: The checkpoint that the run itself has gone on from, if it has.
        records: What the run tells.
        min_replicas: With how few replicas it may go on; None: with no fewer than it began.
        replan: Makes a smaller plan.
        restarts: What became of each restart: `failure`, `after_step` (steps done by then), `from_step`
            (where it went on) and `replicas`.
    """

    max_restarts: int
    folder: str
    initial_checkpoint: Checkpoint | None
    records: RunRecords
    min_replicas: int | None
    replan: Replan
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def run(self, attempt: Attempt, plan: Plan) -> list[Any]:
        """Gives what the processes of the attempt that ended well returned, by rank.

        Raises:
            RunFailedError: The last attempt failed; or a loss was NaN, which it would be again; or it was
                asked to end; or the run directory was removed.
        """
        resume = None if self.initial_checkpoint is None else self.initial_checkpoint.location
        while True:
            reached = _Reached(self.records.on_event)
            try:
                return attempt(plan, resume, reached.on_event)
            except (NotANumberError, EndedError):
                raise
            except RunFailedError as failure:
                if len(self.restarts) >= self.max_restarts or self.records.directory.removed():
                    raise
                steps = reached.steps if failure.steps_done is None else failure.steps_done
                plan, resume = self._again(plan, failure, steps)

    def _again(self, plan: Plan, failure: RunFailedError, reached: int) -> tuple[Plan, str | None]:
        """What to start after a failure, and from where."""
        from isotrain.core.checkpoints.folder import CheckpointFolder  # it imports NumPy

        newest = CheckpointFolder(self.folder).newest() or self.initial_checkpoint
        step = 0 if newest is None else newest.step
        came_no_further = any(each["from_step"] == step for each in self.restarts)
        if came_no_further or failure.lost_host is not None:
            plan = self._smaller(plan, failure.lost_host)
        self.records.rewind(step)
        facts = {"after_step": max(reached, step), "from_step": step, "replicas": plan.replicas}
        self.restarts.append({"failure": str(failure).partition("\n")[0], **facts})
        self.records.note(Restarted(time=time.time(), failure=str(failure), **facts))
        return plan, None if newest is None else newest.location

    def _smaller(self, plan: Plan, lost_host: str | None) -> Plan:
        """The plan without the lost host, or with fewer replicas, if the spec allows that."""
        if self.min_replicas is None:
            return plan
        try:
            smaller = self.replan(plan, lost_host)
        except PlanError:
            return plan
        return smaller if smaller.replicas >= self.min_replicas else plan


class _Reached:
    """Notes how far an attempt came.

    Attributes:
        steps: Steps done, as far as it has told.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self.steps = 0
        self._on_event = on_event

    def on_event(self, event: Event) -> None:
        if isinstance(event, Steps):
            self.steps = event.first + len(event.losses)
        self._on_event(event)
