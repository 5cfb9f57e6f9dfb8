"""Each launcher with what it has to be told on the two hosts, and starting a program by it on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.external_launchers import HOSTS, Started
from cluster.two_hosts import SLOTS, TwoHostCluster

from isotrain.core.launching.scheduler import scheduler_run
from isotrain.launchers.horovodrun import HorovodrunLauncher
from isotrain.launchers.kubernetes import KubernetesLauncher
from isotrain.launchers.mpi import MpiLauncher
from isotrain.launchers.ray import RayLauncher
from isotrain.launchers.slurm import SlurmLauncher
from isotrain.launchers.torchrun import TorchrunLauncher
from isotrain.plugin import RankCommand, SchedulerLauncher

KEY = "0123456789abcdef"
_HOSTS = ",".join(f"{host}:{SLOTS}" for host in HOSTS)
_ALL = SLOTS * len(HOSTS)
LAUNCHERS: Mapping[str, SchedulerLauncher] = {
    "slurm": SlurmLauncher(nodes=len(HOSTS), tasks_per_node=SLOTS, options="--cpus-per-task=1"),
    "mpi": MpiLauncher(hosts=_HOSTS),
    "mpi-hydra": MpiLauncher(hosts=_HOSTS, mpirun="mpiexec.mpich"),
    "torchrun": TorchrunLauncher(hosts=_HOSTS),
    "horovodrun": HorovodrunLauncher(hosts=_HOSTS),
    "horovodrun-mpi": HorovodrunLauncher(hosts=_HOSTS, controller="mpi"),
    "ray": RayLauncher(workers=_ALL),
    "kubernetes": KubernetesLauncher(image="me/train:1", pods=_ALL),
}


@dataclass(frozen=True)
class ProgramCommand(RankCommand):
    """Starts a program of the tests instead of `isotrain run`.

    Attributes:
        program: With its arguments.
    """

    program: tuple[str, ...] = ()

    def on_host(self, python: str, spec: str, run_directory: str) -> tuple[str, ...]:
        return self.program


def program_command(folder: Path, *program: str) -> ProgramCommand:
    """What every rank does; a folder has the files."""
    told = {"ISOTRAIN_TOLD": "a text, with = and 'quotes'", "PYTHONPATH": os.environ["PYTHONPATH"]}
    name = "isotrain-test"
    spec = json.dumps({"name": "it's", "fields": ["of", 1, "$HOME"]})
    return ProgramCommand(name, folder / "spec.json", spec, (), folder, told, KEY, program=program)


def start(bed: TwoHostCluster, name: str, command: RankCommand) -> Started:
    """Starts what a launcher gives, on the first host."""
    submission = LAUNCHERS[name].submission(command)
    scheduler_run.write(submission, command)
    assert name != "ray" or bed.ray
    told = {**bed.slurm.variables, **command.variables, **submission.variables}
    told |= {command.spec_variable: command.secret_variables[command.spec_variable]}
    told |= {command.key_variable: command.key} if submission.key_in_environment else {}
    host, log = bed.with_ssh.first, command.spec.with_name("log")
    running = (host.start(each, log, told, submission.stdin) for each in submission.commands)
    return Started(tuple(running), log)


def require_rank_variables(
    ranks: Sequence[Mapping[str, Any]], name: str, command: RankCommand
) -> None:
    """Fails where a launcher has not started a rank in every place, or has not told each what it must know.

    Args:
        ranks: Of each its `host`, and in `told` its variables.
        name: Of the launcher.
        command: That it was given.
    """
    submission = LAUNCHERS[name].submission(command)
    in_pods = name == "kubernetes"  # each has a name of its own, and the spec in a file
    if not in_pods:
        assert sorted(rank["host"] for rank in ranks) == sorted(HOSTS * SLOTS)
    tells_key = submission.key_in_environment or submission.stdin or in_pods
    for rank in ranks:
        told = rank["told"]
        assert told.get("ISOTRAIN_KEY") == (KEY if tells_key else None)
        assert told.get("ISOTRAIN_SPEC") == (
            None if in_pods else command.secret_variables["ISOTRAIN_SPEC"]
        )
        assert told["ISOTRAIN_TOLD"] == command.variables["ISOTRAIN_TOLD"]
