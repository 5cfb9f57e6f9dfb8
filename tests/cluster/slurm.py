"""SLURM on the hosts of a network: its controller on the first, a node on each."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cluster.network import Network

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
ReturnToService=2
KillWait=5
SlurmdTimeout={missed}
MinJobAge=16
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%h.log
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
BEGIN_SECONDS = 30.0
MISSED_SECONDS = 20
"""After which SLURM takes a node for lost that it does not hear of."""


class Slurm:
    """A running cluster; it ends with its hosts.

    Attributes:
        variables: What its commands need to find it.
    """

    def __init__(self, network: Network, slots: int = 4) -> None:
        """Starts it.

        Args:
            network: Of the hosts.
            slots: Processors that each node is said to have.
        """
        self._network = network
        folder = network.folder / "slurm"
        folder.mkdir()
        configuration = folder / "slurm.conf"
        nodes = (f"NodeName={h.name} NodeAddr={h.address} CPUs={slots}" for h in network.hosts)
        first = network.hosts[0]
        configuration.write_text(
            _CONFIGURATION.format(
                first=first.name,
                address=first.address,
                folder=folder,
                nodes="\n".join(nodes),
                missed=MISSED_SECONDS,
            )
        )
        self.variables = {"SLURM_CONF": str(configuration)}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(key)

    def _start(self, key: Path) -> None:
        for host in self._network.hosts:
            log = "--log-file=/run/munge/log"
            host.check(["munged", "--force", f"--key-file={key}", log])
        self._network.hosts[0].check(["slurmctld"], self.variables)
        for host in self._network.hosts:
            host.check(["slurmd"], self.variables)
        self._wait()

    def _wait(self) -> None:
        """Until every node is there to be used."""
        wanted = [host.name for host in self._network.hosts]
        last = time.monotonic() + BEGIN_SECONDS
        first = self._network.hosts[0]
        while True:
            idle = first.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], self.variables)
            if sorted(idle.stdout.split()) == sorted(wanted):
                return
            assert time.monotonic() < last, f"SLURM's nodes do not come: {idle.stdout}"
            time.sleep(0.2)
