"""Launchers whose processes are started by another program, here or with a run directory of their own."""

from __future__ import annotations

import socket
import sys
from typing import ClassVar

from isotrain.plugin import Allocation, HostSlots, RankCommand, SchedulerLauncher, Submission

SPEC = {
    "name": "Driven_run",
    "model": "integration.scheduler_job:model",
    "data": "integration.scheduler_job:data",
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch_size": 4,
    "epochs": 2,
    "precision": "float64",
}


class WrapperLauncher(SchedulerLauncher):
    """Starts one rank here, by a program between."""

    name = "wrapper"
    summary = "for tests"
    program: ClassVar[tuple[str, ...]] = ("env",)

    def allocation(self) -> Allocation:
        return Allocation((HostSlots(1),))

    def submission(self, command: RankCommand) -> Submission:
        return Submission(((*self.program, *command.arguments),), files={"seen.txt": command.name})


class TwoHere(SchedulerLauncher):
    """Starts two ranks here, the first of which ends with the run; and processes in place of lost ones."""

    name = "two-here"
    summary = "for tests"
    program = 'for RANK in 1 0; do export RANK; "$@" & done; wait $!'

    def allocation(self) -> Allocation:
        return Allocation((HostSlots(2),))

    def why_not_elastic(self) -> str | None:
        return None

    def submission(self, command: RankCommand) -> Submission:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return Submission((("sh", "-c", self.program, "two", *command.arguments),), told)

    def replacement(self, command: RankCommand) -> Submission:
        return Submission((command.arguments,))


class Far(SchedulerLauncher):
    """Starts two ranks, whose run directory is not the one that it is told: this process does not see it.

    Attributes:
        folder: Where each run has one of its own.
    """

    name = "far"
    summary = "for tests"
    program = 'for RANK in 0 1; do export RANK LOCAL_RANK=$RANK; "$@" & done; wait $!'
    folder: ClassVar[str] = ""

    def allocation(self) -> Allocation:
        return Allocation((HostSlots(2),))

    def submission(self, command: RankCommand) -> Submission:
        folder = f"{self.folder}/{command.name}"
        there = command.on_host(sys.executable, f"env:{command.spec_variable}", folder)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
        elastic = {"TORCHELASTIC_RUN_ID": command.name, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        told = {"WORLD_SIZE": "2", **meeting, **elastic}
        return Submission((("sh", "-c", self.program, "far", *there),), told)
