"""Ranks find rank 0 wherever its name leads them, and however it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster.network import OTHER, sent_bytes
from cluster.two_hosts import TwoHostCluster
from integration import scheduler_job

SPEC = scheduler_job.SPEC | {"name": "found", "timeouts": {"start": 30.0}}
_SRUN = ("srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1")


def trained(bed: TwoHostCluster, name: str, *how: str, interface: str = "") -> str:
    """What a run on the first host says; `how` is what stands before the command, or options of it."""
    folder = bed.folder / f"found-{name}"
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(SPEC))
    launcher = [part for part in how if how[0] == "srun"]
    options = [part for part in how if how[0] != "srun"]
    run = ["isotrain", "run", str(folder / "spec.json"), "--backend", "reference"]
    where = ["--output", str(folder / "run")]
    over = ["--interface", interface] if interface else []
    told = bed.with_ssh.slurm.variables
    done = bed.first.run([*launcher, *run, *where, *over, *options], told)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_one_host_is_called_by_its_name(bed: TwoHostCluster) -> None:
    option = ("--launcher-option", "hosts=node1:2")
    assert "final loss" in trained(bed, "one", "--launcher", "mpi", *option)


@pytest.mark.parametrize("interface", ["", "eth0"])
def test_a_hosts_name_may_resolve_to_its_loopback_address(
    bed: TwoHostCluster, interface: str
) -> None:
    """Debian has it so in /etc/hosts."""
    hosts = bed.folder / f"hosts-{interface}"
    hosts.write_text("127.0.1.1 node1\n" + Path(bed.folder / "etc" / "hosts").read_text())
    bed.first.check(["mount", "--bind", str(hosts), "/etc/hosts"])
    try:
        said = trained(bed, f"debian-{interface}", *_SRUN, interface=interface)
    finally:
        bed.first.check(["umount", "/etc/hosts"])
    assert said.count("final loss") == 1


def test_tensors_use_the_requested_interface(bed: TwoHostCluster) -> None:
    with bed.network.with_other_interface():
        trained(bed, OTHER, *_SRUN, interface=OTHER)
        assert sent_bytes(bed.first, OTHER) > 1000
