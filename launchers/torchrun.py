"""torchrun: one agent on each host, which starts the ranks of that host."""

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
_REMOTE_SCRIPT = "{read} cd {folder} && exec env {command}"
_READ_VARIABLE = "IFS= read -r {variable}; export {variable};"


class TorchrunLauncher(SchedulerLauncher):
    """Starts the ranks by torchrun, on this machine or over SSH on each of several hosts."""

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
        """Keeps the options.

        Args:
            hosts: Hosts with their numbers of processes, `node1:2,node2:2`; left out: the hosts of the job
                of SLURM, PBS or LSF that this process is in, else this machine.
            processes: Number of processes on this machine, without `hosts`; left out: as many as the
                requested replicas take.
            gpus_per_host: GPUs of each host, if they differ from this machine's.
            port: Port of the agents' rendezvous, on the first host.
            ssh: Command that starts an agent on another host, with its options.
        """
        self._host_options = HostOptions(self.name, hosts, processes, gpus_per_host)
        self._port = port
        self._ssh = shlex.split(ssh)

    def availability(self) -> Availability:
        if find_spec("torch") is None:
            return Availability(False, None, "torch is not installed", "pip install torch")
        try:
            allocation = self.allocation()
        except PlanError as error:
            return Availability(False, None, str(error).rstrip("."), "or start torchrun by hand")
        remote_hosts = {*allocation.hosts} - {local_host(allocation)}
        if remote_hosts and shutil.which(self._ssh[0]) is None:
            return Availability(False, None, f"there is no {self._ssh[0]}", "install OpenSSH")
        return Availability(True)

    def allocation(self) -> Allocation:
        return self._host_options.allocation(os.environ)

    def options_for(self, processes: int) -> Mapping[str, Any]:
        return self._host_options.options_for(processes)

    def without(self, host: str) -> Mapping[str, Any]:
        return self._host_options.without(host)

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        if not allocation.is_even:
            raise PlanError(
                "torchrun: hosts: expected the same number of processes on every host; received"
                f" {as_text(allocation)}."
            )
        slots = f"--nproc-per-node={allocation.host_slots[0].slots}"
        if not allocation.hosts:
            local_agent = (*_AGENT, "--standalone", slots, "--no-python", *command.arguments)
            return Submission((local_agent,))
        agent = self._agent(allocation, command, slots)
        script = _agent_script(agent, command)
        this_host = local_host(allocation)
        commands = (
            ("sh", "-c", script) if host == this_host else (*self._ssh, host, script)
            for host in allocation.hosts
        )
        lines = "".join(f"{text}\n" for text in command.secret_variables.values())
        return Submission(tuple(commands), key_in_environment=False, stdin=lines)

    def _agent(self, allocation: Allocation, command: RankCommand, slots: str) -> tuple[str, ...]:
        hosts = allocation.hosts
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0]}:{self._port}")
        size = (f"--nnodes={len(hosts)}", slots, f"--rdzv-id={command.name}")
        return (*_AGENT, *size, *rendezvous, "--no-python", *command.arguments)


def _agent_script(agent: tuple[str, ...], command: RankCommand) -> str:
    """Shell script of an agent; it reads key and spec from standard input, as command lines are public."""
    variables = [f"{name}={value}" for name, value in command.variables.items()]
    return _REMOTE_SCRIPT.format(
        read=" ".join(_READ_VARIABLE.format(variable=name) for name in command.secret_variables),
        folder=shlex.quote(os.getcwd()),
        command=shlex.join([*variables, *agent]),
    )
