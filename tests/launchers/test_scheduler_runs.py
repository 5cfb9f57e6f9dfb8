"""A run that a launcher was given ends here as it ended there, leaves nothing behind, and shares no folder.

It is started on the second host, and has its directory where no other host sees it; rank 0 is on the first.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
from cluster import kubectl
from cluster.hosts import Host, end
from cluster.two_hosts import TwoHostCluster
from helpers.waiting import wait_until
from integration import scheduler_job

import isotrain
from isotrain.core.cli.exit_codes import ExitCode

SECONDS = 90.0
SPEC = scheduler_job.SPEC | {"name": "driven"}
_HOSTS = "hosts=node1:1,node2:1"
HOW = {
    "slurm": ("slurm", "nodes=2", "tasks_per_node=1"),
    "mpi": ("mpi", "hosts=node1:2"),
    "torchrun": ("torchrun", _HOSTS),
    "horovodrun": ("horovodrun", _HOSTS),
    "ray": ("ray", "workers=2", "placement=STRICT_SPREAD"),
    "job": ("kubernetes", "image=me/train:1", "pods=2"),
    "jobset": ("kubernetes", "image=me/train:1", "pods=2", "kind=jobset"),
}
"""Launchers and their options."""


@dataclass(frozen=True)
class Driven:
    """A run that is started on the second host.

    Attributes:
        bed: With its hosts.
        how: Of the launchers, with its options.
        name: Of the run.
    """

    bed: TwoHostCluster
    how: str
    name: str

    @property
    def host(self) -> Host:
        """The host on which the run is started."""
        return self.bed.network.hosts[1]

    @property
    def folder(self) -> str:
        """Run directory: it has the same name on every host, and is another folder on each."""
        return f"/run/{self.name}-{self.how}"

    def command(self, *options: str, **changes: Any) -> list[str]:
        """Starts the run."""
        bed = self.bed.with_ssh
        assert self.how != "ray" or bed.ray
        spec = bed.folder / f"{self.name}-{self.how}.json"
        spec.write_text(json.dumps({**SPEC, **changes}))
        launcher, *chosen = HOW[self.how]
        run = ["isotrain", "run", str(spec), "--backend", "reference", "--output", self.folder]
        asked = [part for option in chosen for part in ("--launcher-option", option)]
        return [*run, "--launcher", launcher, *asked, *options]

    def read(self, name: str) -> str:
        """Text of one of its files."""
        return self.host.check(["cat", f"{self.folder}/{name}"])


def left(bed: TwoHostCluster) -> Iterator[str]:
    """What still runs on any host, or is kept by the cluster."""
    for host in bed.network.hosts:
        yield from (
            line
            for line in host.check(["ps", "-A", "-o", "args"]).splitlines()
            if "-m isotrain run" in line
        )
        yield from host.check(["find", "/run", "-path", f"{kubectl.STATE}/*"]).split()


@pytest.mark.parametrize("how", ["slurm", "mpi", "job"])
def test_the_files_of_a_run_come_to_where_it_was_started(bed: TwoHostCluster, how: str) -> None:
    driven = Driven(bed, how, "well")
    done = driven.host.run(driven.command(), bed.slurm.variables)
    assert done.returncode == 0, done.stdout
    kept = bed.folder / f"well-{how}"
    driven.host.check(["cp", "--recursive", driven.folder, str(kept)])
    found = isotrain.read_result(kept)
    local = isotrain.run(
        SPEC, backend="reference", output=kept / "local", on_event=lambda event: None
    )
    assert found.history.loss == pytest.approx(local.history.loss, rel=1e-6)
    assert found.plan["launcher"] == HOW[how][0]
    for name, weights in local.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=1e-6)
    assert sorted(each.name for each in kept.glob("rank-*.log")) == ["rank-0.log", "rank-1.log"]


def test_backends_are_compared_and_traced_by_a_launcher(bed: TwoHostCluster) -> None:
    driven = Driven(bed, "slurm", "rows")
    _, spec, *rest = driven.command()[1:]
    launcher = rest[rest.index("--launcher") :]
    asked = ["isotrain", "compare", spec, "--backend", "reference", *launcher]
    quick = ("--repeats", "1", "--run-limit", "0.05s", "--steps", "3", "--quiet", "--json")
    done = driven.host.run([*asked, *quick, "--output", driven.folder], bed.slurm.variables)
    assert done.returncode == 0, done.stdout
    (cell,) = json.loads(done.stdout[done.stdout.index("{") :])["cells"]
    assert (cell["name"], cell["plan"]["launcher"]) == ("reference@2", "slurm")
    assert len(cell["repeats"][0]["peak_memory_bytes"]) == 2
    rows = ("--strategy", "data-parallel", "--strategy", "hierarchical")
    traced = ["isotrain", "parity", spec, "--backend", "reference", *rows, *launcher]
    traced += ["--steps", "1", "--output"]
    apart = driven.host.run([*traced, "/run/traced"], bed.slurm.variables)
    assert apart.returncode == ExitCode.RUN_FAILED, apart.stdout
    assert "parity: node1 does not see /run/traced" in apart.stdout
    shared = driven.host.run([*traced, str(bed.folder / "traced")], bed.slurm.variables)
    assert shared.returncode == 0, shared.stdout


def test_checkpoints_that_not_all_hosts_would_see_are_refused(bed: TwoHostCluster) -> None:
    driven = Driven(bed, "slurm", "saving")
    command = driven.command(checkpoint={"every_steps": 1})
    done = driven.host.run(command, bed.slurm.variables)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert f"node2 cannot see {driven.folder}/checkpoints. Choose" in done.stdout


@pytest.mark.parametrize("how", HOW)
def test_an_error_of_a_rank_is_raised_here(bed: TwoHostCluster, how: str) -> None:
    driven = Driven(bed, how, "raised")
    data = "integration.scheduler_job:data_not_finite"
    done = driven.host.run(driven.command(data=data), bed.slurm.variables)
    assert done.returncode == ExitCode.NOT_A_NUMBER, done.stdout
    assert "the loss of step 0 is NaN" in done.stdout
    assert "samples are made" in driven.read("rank-1.log")
    assert not [*left(bed)]


@pytest.mark.parametrize("how", ["ray", "job"])
def test_a_killed_rank_is_named_here(bed: TwoHostCluster, how: str) -> None:
    """Other launchers are covered by test_lost_ranks.py."""
    driven = Driven(bed, how, "killed")
    done = driven.host.run(driven.command(data="integration.scheduler_job:data_killed_on_rank_1"))
    assert done.returncode == ExitCode.RUN_FAILED, done.stdout
    assert re.search("rank 1 of 2 on .* is gone: its connection to rank 0 was closed", done.stdout)
    assert not [*left(bed)]


@pytest.mark.parametrize("how", [name for name in HOW if name != "jobset"])
def test_an_interrupt_ends_the_ranks_everywhere(bed: TwoHostCluster, how: str) -> None:
    driven = Driven(bed, how, "interrupted")
    slow = {"data": "integration.scheduler_job:SlowAndLoud", "epochs": 1000}
    log = bed.folder / f"interrupted-{how}.log"
    command = driven.command("--ranks", "1", **slow)
    started = driven.host.start(command, log, bed.slurm.variables)
    try:
        wait_until(lambda: "samples are read" in log.read_text() or started.poll(), SECONDS)
        assert [*left(bed)], log.read_text()
        said = driven.host.check(["isotrain", "logs", driven.folder, "--rank", "1"])
        assert "samples are read" in said
        (run,) = psutil.Process(started.pid).children()
        run.send_signal(signal.SIGINT)
        assert started.wait(SECONDS) == ExitCode.INTERRUPTED, log.read_text()
    finally:
        end(started)
    wait_until(lambda: not [*left(bed)], SECONDS)


def test_a_job_step_ends_when_its_starter_is_killed(bed: TwoHostCluster) -> None:
    folder = bed.folder / "inside"
    folder.mkdir()
    slow = {"data": "integration.scheduler_job:SlowAndLoud", "epochs": 1000}
    (folder / "spec.json").write_text(json.dumps({**SPEC, **slow}))
    run = f"isotrain run {folder}/spec.json --backend reference --launcher slurm --quiet"
    script = folder / "job.sh"
    begun = f"{run} --output {folder}/run & echo $! > {folder}/pid"
    script.write_text(f"#!/bin/sh\n{begun}\nwait\nsleep 1000\n")
    size = ("--nodes=2", "--ntasks-per-node=1", f"--output={folder}/said")
    variables = bed.slurm.variables
    job = bed.first.check(["sbatch", "--parsable", *size, str(script)], variables).strip()

    def listed(*what: str) -> str:
        return bed.first.check(["squeue", "--noheader", f"--jobs={job}", *what], variables)

    try:
        wait_until((folder / "run" / "steps.jsonl").exists, SECONDS)
        assert "isotrain-" in listed("--steps", "--format=%j"), [*left(bed)]
        bed.first.check(["kill", "-KILL", (folder / "pid").read_text().strip()])
        wait_until(lambda: "isotrain-" not in listed("--steps", "--format=%j"), SECONDS)
        wait_until(lambda: not [*left(bed)], SECONDS)
        assert listed("--format=%T") == "RUNNING\n"
    finally:
        bed.first.check(["scancel", job], variables)
