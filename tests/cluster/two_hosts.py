"""The bed: two hosts that see each other, with SSH and SLURM, and Ray where it is asked for."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from cluster import ssh
from cluster.hosts import Host
from cluster.network import Network
from cluster.slurm import Slurm

COMMANDS = {
    "isotrain": "isotrain",
    "torchrun": "torch.distributed.run",
    "horovodrun": "horovod.runner.launch",
    "ray": "ray.scripts.scripts",
    "kubectl": "cluster.kubectl",
}
"""What the hosts have by name, and the module that each runs."""
SLOTS = 2
"""Processes that each host is meant for."""


class TwoHostCluster:
    """Two hosts and what runs on them; launchers start there on first use.

    Attributes:
        network: The hosts and what is between them.
        python: The interpreter that launchers are given.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.python = sys.executable
        (self.folder / "bin").mkdir()
        for name, module in COMMANDS.items():
            command = self.folder / "bin" / name
            command.write_text(f'#!/bin/sh\nexec {self.python} -m {module} "$@"\n')
            command.chmod(0o755)

    @property
    def folder(self) -> Path:
        """The folder that the hosts share."""
        return self.network.folder

    @property
    def first(self) -> Host:
        """The host that commands are given on."""
        return self.network.hosts[0]

    @property
    def bin(self) -> Path:
        """The folder with commands of launchers from PyPI."""
        return Path(self.python).parent

    @cached_property
    def with_ssh(self) -> TwoHostCluster:
        """This one, once its hosts let each other in."""
        ssh.let_in(self.network, {})
        return self

    @cached_property
    def slurm(self) -> Slurm:
        """SLURM on these hosts."""
        return Slurm(self.network)

    @cached_property
    def ray(self) -> str:
        """The address of the head of a Ray cluster on these hosts."""
        head = f"{self.first.address}:6379"
        size = (f"--num-cpus={SLOTS}", "--object-store-memory=100000000", "--disable-usage-stats")
        own = f"--node-ip-address={self.first.address}"
        begin = ("ray", "start", "--head", own, "--port=6379", "--include-dashboard=false")
        alike = '{"worker_niceness": 0}'  # else its ranks wait for everybody on a busy machine
        self.first.check([*begin, *size, f"--system-config={alike}"])
        for host in self.network.hosts[1:]:
            join = ("ray", "start", f"--address={head}", f"--node-ip-address={host.address}")
            host.check([*join, *size])
        return head


@contextmanager
def two_hosts() -> Iterator[TwoHostCluster]:
    """A bed; afterwards nothing is left of it."""
    with (
        tempfile.TemporaryDirectory(prefix="isotrain-bed-", dir="/tmp") as folder,
        Network(Path(folder)) as network,
    ):
        yield TwoHostCluster(network)
