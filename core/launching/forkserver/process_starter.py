"""Starts the processes of one run in the way that its plan says."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from isotrain.core.contracts.events import LauncherNote, OnEvent
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import VARIABLE
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.forkserver import pool
from isotrain.core.launching.forkserver.client import ForkServer, ForkServerError
from isotrain.core.launching.forkserver.process_handle import (
    ProcessArgs,
    ProcessHandle,
    SpawnedProcess,
)


def start_fork_server(plan: Plan) -> None:
    """Begins to start the template of a plan, where it has one, before a launcher is there to ask for it.

    It imports while the rest is made ready. Where it cannot be started the launcher finds out, and says so.
    """
    if (
        plan.start_method.way == "forked" and VARIABLE not in os.environ
    ):  # else the launcher refuses
        with contextlib.suppress(ForkServerError):
            pool.FORK_SERVERS.get(plan.start_method.imports, _variables(plan))


def _variables(plan: Plan) -> Mapping[str, str]:
    """Of every process, but for those that tell it its place."""
    return {**os.environ, **plan.environment_variables, "PYTHONUNBUFFERED": "1"}


class ProcessStarter:
    """Starts processes; the first thing that a launcher makes, for a template imports meanwhile.

    Attributes:
        variables: Of every process, but for those that tell it its place.
    """

    def __init__(self, plan: Plan, on_event: OnEvent) -> None:
        """Begins to start a template, where the plan says so and there is none yet.

        Args:
            plan: Says how.
            on_event: Told where processes start in another way than the plan says.
        """
        self.variables = _variables(plan)
        self._timeouts = plan.timeouts
        self._on_event = on_event
        self._begun = 0
        self._template: ForkServer | None = None
        if plan.start_method.way == "forked":
            try:
                imports = plan.start_method.imports
                self._template = pool.FORK_SERVERS.get(imports, self.variables)
            except ForkServerError as error:
                self._remark(error)

    def spawn(self, beginning: ProcessArgs) -> ProcessHandle:
        """Starts a process; by itself where the template turned out to be broken at the first one.

        Raises:
            RunFailedError: It cannot be started.
        """
        try:
            begun = self._forked(beginning) or SpawnedProcess(beginning)
        except (OSError, ForkServerError) as error:
            raise RunFailedError(
                f"a process of the run cannot be started, after {self._begun} of them were: {error}."
                " The run was ended. See whether this machine has memory left, and how many"
                " processes and open files it allows (`ulimit -a`)."
            ) from error
        self._begun += 1
        return begun

    def _forked(self, beginning: ProcessArgs) -> ProcessHandle | None:
        """Forks a process; None where they start by themselves.

        Raises:
            ForkServerError: The template is broken, and others of the run live or lived on it.
        """
        if self._template is None:
            return None
        try:
            return self._template.fork(
                beginning, self._timeouts["silence"], self._timeouts["start"]
            )
        except ForkServerError as error:
            pool.FORK_SERVERS.drop(self._template, str(error))
            if self._begun:
                raise ForkServerError(
                    f"the template they are forked from failed: {error}"
                ) from error
            self._template = None
            self._remark(error)
            return None

    def _remark(self, error: ForkServerError) -> None:
        text = f"every process starts by itself, for the one to fork from cannot be used: {error}"
        self._on_event(LauncherNote(time=time.time(), text=text))
