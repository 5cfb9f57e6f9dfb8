"""How each launcher starts a command on every rank: two hosts, two processes on each."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.hosts import Host, end
from cluster.two_hosts import SLOTS, TwoHostCluster

Command = Sequence[str]


@dataclass(frozen=True)
class Started:
    """A launcher that was started.

    Attributes:
        processes: What a person would have typed: one command, or one on each host.
        log: What they said.
    """

    processes: tuple[subprocess.Popen[bytes], ...]
    log: Path

    def wait(self, seconds: float) -> list[int]:
        """The exit statuses."""
        return [process.wait(seconds) for process in self.processes]

    def end(self) -> None:
        """Ends what still runs."""
        for process in self.processes:
            end(process)


@dataclass(frozen=True)
class ExternalLauncher:
    """How a launcher starts a command on every rank.

    Attributes:
        name: Name of the launcher, and of the way it is used.
        typed: What is typed, and on which hosts, given the bed and the command.
        order: The variable that tells ranks apart.
    """

    name: str
    typed: Callable[[TwoHostCluster, Command], Sequence[tuple[Host, Command]]]
    order: str

    @property
    def is_slurm(self) -> bool:
        """Whether it is SLURM, or another one in a job of it."""
        return "srun" in self.name or "sbatch" in self.name

    def start(self, bed: TwoHostCluster, command: Command, log: Path) -> Started:
        """Starts it."""
        typed = self.typed(bed, command)
        variables = bed.slurm.variables if self.is_slurm else {}
        return Started(tuple(host.start(each, log, variables) for host, each in typed), log)


def _srun(*options: str) -> Command:
    return ("srun", f"--nodes={len(HOSTS)}", f"--ntasks-per-node={SLOTS}", *options)


HOSTS = ("node1", "node2")
_PLACES = ",".join(f"{name}:{SLOTS}" for name in HOSTS)
_ALL = str(SLOTS * len(HOSTS))


def _by_srun(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    return [(bed.first, [*_srun("--kill-on-bad-exit=1"), *command])]


def _by_heterogeneous_srun(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    one, three = ("--nodes=1", "--ntasks=1"), ("--nodes=1", "--ntasks=3")
    return [(bed.first, ["srun", *one, *command, ":", *three, *command])]


def _in_sbatch(bed: TwoHostCluster, text: str) -> list[tuple[Host, Command]]:
    """Submits a script and waits for its end."""
    script = bed.folder / "script.sh"
    script.write_text(f"#!/bin/sh\n{text}\n")
    said = f"--output={bed.folder / 'sbatch.log'}"
    size = (f"--nodes={len(HOSTS)}", f"--ntasks-per-node={SLOTS}")
    return [(bed.first, ["sbatch", "--wait", *size, said, str(script)])]


def _by_sbatch(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    return _in_sbatch(bed, f"srun {' '.join(command)}")


def _by_script(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    return _in_sbatch(bed, " ".join(command))


def _by_mpirun(bed: TwoHostCluster, command: Command, *options: str) -> list[tuple[Host, Command]]:
    mpirun = ("mpirun", "--allow-run-as-root", "--host", _PLACES, "-np", _ALL)
    given = ("-x", "PATH", "-x", "PYTHONPATH")
    return [(bed.with_ssh.first, [*mpirun, *given, *options, *command])]


def _by_mpirun_in_sbatch(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    return _in_sbatch(bed, f"mpirun --allow-run-as-root {' '.join(command)}")


def _by_hydra(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    mpiexec = ("mpiexec.mpich", "-launcher", "ssh", "-hosts", _PLACES, "-np", _ALL)
    return [(bed.with_ssh.first, [*mpiexec, *command])]


def _torchrun(bed: TwoHostCluster) -> Command:
    size = (f"--nnodes={len(HOSTS)}", f"--nproc-per-node={SLOTS}", "--rdzv-id=run7")
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={bed.first.name}:29400")
    return (bed.python, "-m", "torch.distributed.run", *size, *meeting, "--no-python")


def _by_torchrun(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    return [(host, [*_torchrun(bed), *command]) for host in bed.network.hosts]


def _by_torchrun_under_srun(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    srun = ("srun", f"--nodes={len(HOSTS)}", "--ntasks-per-node=1", "--cpus-per-task=2")
    return [(bed.first, [*srun, *_torchrun(bed), *command])]


def _by_horovodrun(
    bed: TwoHostCluster, command: Command, controller: str
) -> list[tuple[Host, Command]]:
    horovodrun = (bed.python, "-m", "horovod.runner.launch", controller, "-np", _ALL)
    return [(bed.with_ssh.first, [*horovodrun, "-H", _PLACES, *command])]


def _by_ray(bed: TwoHostCluster, command: Command) -> list[tuple[Host, Command]]:
    assert bed.ray
    program = str(Path(__file__).with_name("ray_ranks.py"))
    return [(bed.first, [bed.python, program, _ALL, str(bed.folder / "ray"), *command])]


EXTERNAL_LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        ExternalLauncher("srun", _by_srun, "SLURM_PROCID"),
        ExternalLauncher("srun-heterogeneous", _by_heterogeneous_srun, "SLURM_PROCID"),
        ExternalLauncher("sbatch", _by_sbatch, "SLURM_PROCID"),
        ExternalLauncher("sbatch-script", _by_script, "SLURM_PROCID"),
        ExternalLauncher("mpirun", _by_mpirun, "OMPI_COMM_WORLD_RANK"),
        ExternalLauncher("mpirun-in-sbatch", _by_mpirun_in_sbatch, "OMPI_COMM_WORLD_RANK"),
        ExternalLauncher("hydra", _by_hydra, "PMI_RANK"),
        ExternalLauncher("torchrun", _by_torchrun, "RANK"),
        ExternalLauncher("torchrun-under-srun", _by_torchrun_under_srun, "RANK"),
        ExternalLauncher("horovodrun", lambda b, c: _by_horovodrun(b, c, "--gloo"), "HOROVOD_RANK"),
        ExternalLauncher(
            "horovodrun-mpi", lambda b, c: _by_horovodrun(b, c, "--mpi"), "OMPI_COMM_WORLD_RANK"
        ),
        ExternalLauncher("ray", _by_ray, "RANK"),
    )
}
"""By name."""


def mpirun_with(*options: str) -> ExternalLauncher:
    """`mpirun`, told further options."""
    plain = EXTERNAL_LAUNCHERS["mpirun"]
    return replace(plain, typed=lambda bed, command: _by_mpirun(bed, command, *options))
