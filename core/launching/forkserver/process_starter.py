"""Starts the rank processes of a run with its plan's start method: fork server or fresh interpreter."""

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
    """Starts the fork server of a plan, if it has one, before its launcher exists.

    It imports while the rest of the run is prepared. If it cannot be started, the launcher tries again and
    notes the error.
    """
    # inside of a run the launcher will refuse to start another one
    if plan.start_method.way == "forked" and VARIABLE not in os.environ:
        with contextlib.suppress(ForkServerError):
            pool.FORK_SERVERS.get(plan.start_method.imports, _variables(plan))


def _variables(plan: Plan) -> Mapping[str, str]:
    """Environment of every rank process, without the variables that differ per rank."""
    return {**os.environ, **plan.environment_variables, "PYTHONUNBUFFERED": "1"}


class ProcessStarter:
    """Starts rank processes. A launcher creates it first, so that the fork server imports meanwhile.

    Attributes:
        variables: Environment of every rank process, without the variables that differ per rank.
    """

    def __init__(self, plan: Plan, on_event: OnEvent) -> None:
        """Starts the fork server of the plan, if it has one that is not running yet.

        Args:
            plan: Plan with the start method and the timeouts.
            on_event: Receives a note if fresh interpreters are started although the plan has a fork server.
        """
        self.variables = _variables(plan)
        self._timeouts = plan.timeouts
        self._on_event = on_event
        self._started_count = 0
        self._fork_server: ForkServer | None = None
        if plan.start_method.way == "forked":
            try:
                imports = plan.start_method.imports
                self._fork_server = pool.FORK_SERVERS.get(imports, self.variables)
            except ForkServerError as error:
                self._note_fallback(error)

    def spawn(self, arguments: ProcessArgs) -> ProcessHandle:
        """Starts a rank process; with a fresh interpreter if the fork server failed at the first one.

        Raises:
            RunFailedError: It cannot be started.
        """
        handle: ProcessHandle | None = None
        try:
            if self._fork_server is not None:
                try:
                    handle = self._fork_server.fork(
                        arguments, self._timeouts["silence"], self._timeouts["start"]
                    )
                except ForkServerError as error:
                    self._drop_fork_server(self._fork_server, error)
            handle = handle or SpawnedProcess(arguments)
        except (OSError, ForkServerError) as error:
            raise RunFailedError(
                f"a process of the run cannot be started, after {self._started_count} were: {error}."
                " The run was ended. See whether this machine has memory left, and how many"
                " processes and open files it allows (`ulimit -a`)."
            ) from error
        self._started_count += 1
        return handle

    def _drop_fork_server(self, fork_server: ForkServer, error: ForkServerError) -> None:
        """Has every process of the run start with a fresh interpreter.

        Raises:
            ForkServerError: The fork server has forked other ranks of the run.
        """
        pool.FORK_SERVERS.drop(fork_server, str(error))
        if self._started_count:
            raise ForkServerError(f"their fork server failed: {error}") from error
        self._fork_server = None
        self._note_fallback(error)

    def _note_fallback(self, error: ForkServerError) -> None:
        text = (
            "every process starts with a fresh interpreter, because the fork server cannot be used:"
            f" {error}"
        )
        self._on_event(LauncherNote(time=time.time(), text=text))
