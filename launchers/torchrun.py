"""torchrun: an agent on each host, which starts the ranks of that host."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from isotrain.launchers.host_options import HostOptions, as_text, local_host
from isotrain.plugin import (
    Allocation,
    Availability,
    PlanError,
    RankCommand,
    SchedulerLauncher,
    Submission,
)

_AGENT = (sys.executable, "-m", "torch.distributed.run")
_REMOTE = "{reading} cd {folder} && exec env {command}"
_READING = "IFS= read -r {variable}; export {variable};"


class TorchrunLauncher(SchedulerLauncher):
    """Has torchrun start the ranks: here, or over SSH on each of several hosts."""

    name = "torchrun"
    summary = "torchrun, on this machine or on hosts that SSH reaches"

    def __init__(
        self,
        hosts: str | None = None,
        processes: int | None = None,
        gpus_per_host: int | None = None,
        port: int = 29400,
        ssh: str = "ssh",
    ) -> None:
        """Takes where to start.

        Args:
            hosts: `node1:2,node2:2`: where, and how many processes; left out: on the hosts of the job of
                SLURM, PBS or LSF that this process is in, else on this machine.
            processes: On this machine, where no hosts are given.
            gpus_per_host: Where they cannot be looked at from here.
            port: On the first host, where the agents meet.
            ssh: The program that starts an agent on another host, with its options.
        """
        self._where = HostOptions(self.name, hosts, processes, gpus_per_host)
        self._port = port
        self._ssh = shlex.split(ssh)

    def availability(self) -> Availability:
        if find_spec("torch") is None:
            return Availability(False, None, "torch is not installed", "pip install torch")
        try:
            allocation = self.allocation()
        except PlanError as error:
            return Availability(False, None, str(error).rstrip("."), "or start torchrun by hand")
        by_ssh = {*allocation.hosts} - {local_host(allocation)}
        if by_ssh and shutil.which(self._ssh[0]) is None:
            return Availability(False, None, f"there is no {self._ssh[0]}", "install OpenSSH")
        return Availability(True)

    def allocation(self) -> Allocation:
        return self._where.allocation(os.environ)

    def without(self, host: str) -> Mapping[str, Any]:
        return self._where.without(host)

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        if not allocation.is_even:
            raise PlanError(
                "torchrun: hosts: every host runs as many processes as the others; received"
                f" {as_text(allocation)}."
            )
        slots = f"--nproc-per-node={allocation.host_slots[0].slots}"
        if not allocation.hosts:
            here = (*_AGENT, "--standalone", slots, "--no-python", *command.arguments)
            return Submission((here,))
        agent = self._agent(allocation, command, slots)
        script = _reading_script(agent, command)
        own = local_host(allocation)
        commands = (
            ("sh", "-c", script) if host == own else (*self._ssh, host, script)
            for host in allocation.hosts
        )
        lines = "".join(f"{text}\n" for text in command.secret_variables.values())
        return Submission(tuple(commands), key_in_environment=False, stdin=lines)

    def _agent(self, allocation: Allocation, command: RankCommand, slots: str) -> tuple[str, ...]:
        hosts = allocation.hosts
        rendezvous_variables = ("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0]}:{self._port}")
        size = (f"--nnodes={len(hosts)}", slots, f"--rdzv-id={command.name}")
        return (*_AGENT, *size, *rendezvous_variables, "--no-python", *command.arguments)


def _reading_script(agent: tuple[str, ...], command: RankCommand) -> str:
    """For a shell: key and spec come by standard input, since a command line can be read by everybody."""
    variables = [f"{name}={value}" for name, value in command.variables.items()]
    return _REMOTE.format(
        reading=" ".join(_READING.format(variable=name) for name in command.secret_variables),
        folder=shlex.quote(os.getcwd()),
        command=shlex.join([*variables, *agent]),
    )
