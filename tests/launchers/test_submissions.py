"""What launchers submit is taken by real schedulers, and starts a rank in every place with the key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.jobset_schema import validate
from cluster.launchers import (
    LAUNCHERS,
    ProgramCommand,
    program_command,
    require_rank_variables,
    start,
)
from cluster.two_hosts import TwoHostCluster
from jsonschema import ValidationError

from isotrain.launchers.kubernetes import KubernetesLauncher
from isotrain.launchers.slurm import SlurmLauncher

_RANK = str(Path(__file__).parents[1] / "cluster" / "rank_variables.py")
ON_HOSTS = [name for name in LAUNCHERS if name != "kubernetes"]


def a_command(folder: Path) -> ProgramCommand:
    """A command by which each rank writes down its variables."""
    (folder / "ranks").mkdir()
    return program_command(folder, sys.executable, "-S", "-E", _RANK, str(folder / "ranks"))


@pytest.fixture
def folder(bed: TwoHostCluster, request: pytest.FixtureRequest) -> Path:
    found = bed.folder / request.node.name.translate(str.maketrans("[]", "--"))
    found.mkdir()
    return found


def test_horovodrun_starts_every_rank_by_mpi_too(bed: TwoHostCluster, folder: Path) -> None:
    """The other launchers start runs in test_external_launch.py, which checks the same."""
    command = a_command(folder)
    started = start(bed, "horovodrun-mpi", command)
    try:
        statuses = started.wait(60)
    finally:
        started.end()
    assert not any(statuses), started.log.read_text()
    ranks = [json.loads(file.read_text()) for file in (folder / "ranks").iterdir()]
    told = [{"host": rank["host"], "told": rank["variables"]} for rank in ranks]
    require_rank_variables(told, "horovodrun-mpi", command)


def test_sbatch_accepts_the_script(bed: TwoHostCluster, folder: Path) -> None:
    launcher = SlurmLauncher(nodes=2, tasks_per_node=2, partition="main", time="0:10:00")
    script = folder / "job.sh"
    script.write_text(launcher.submission(a_command(folder)).files["job.sh"])
    said = bed.first.run(["sbatch", "--test-only", str(script)], bed.slurm.variables)
    assert said.returncode == 0, said.stdout
    assert "node[1-2]" in said.stdout
    wrong = script.read_text().replace("--partition=main", "--partition=other")
    script.write_text(wrong)
    assert bed.first.run(["sbatch", "--test-only", str(script)], bed.slurm.variables).returncode


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_manifests_are_valid_by_the_schemas_of_kubernetes(tmp_path: Path, kind: Any) -> None:
    options = {"image": "me/train:1", "volume": "kept", "tls": "certificates"}
    launcher = KubernetesLauncher(pods=4, gpus=1, kind=kind, **options)
    text = launcher.submission(a_command(tmp_path)).files["job.yaml"]
    for part in yaml.safe_load_all(text):
        validate(part)
        part["spec" if "spec" in part else "data"] = "no table"
        with pytest.raises(ValidationError):
            validate(part)


WRONG = {
    "version": lambda part: part.update(apiVersion="jobset.x-k8s.io/v1"),
    "network": lambda part: part["spec"]["network"].update(enableDnsHostnames=True),
    "restarts": lambda part: part["spec"]["failurePolicy"].update(maxRestarts="0"),
    "policy": lambda part: part["spec"].update(failurePolicies={}),
    "jobs": lambda part: part["spec"]["replicatedJobs"][0].pop("name"),
    "pods": lambda part: part["spec"]["replicatedJobs"][0]["template"]["spec"].update(pods=4),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_invalid_jobset_is_refused(tmp_path: Path, what: str) -> None:
    launcher = KubernetesLauncher(image="me/train:1", pods=4, kind="jobset")
    (part,) = (
        part
        for part in yaml.safe_load_all(launcher.submission(a_command(tmp_path)).files["job.yaml"])
        if part["kind"] == "JobSet"
    )
    validate(part)
    WRONG[what](part)
    with pytest.raises(ValidationError):
        validate(part)


def test_required_programs_are_here(bed: TwoHostCluster) -> None:
    found = {name: LAUNCHERS[name].availability().reason for name in ON_HOSTS}
    assert found == dict.fromkeys(ON_HOSTS)
