"""A backend with all its replicas in one process, in a process that a scheduler starts alone on a host."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from cluster import external_job
from cluster.two_hosts import TwoHostCluster

import isotrain

BACKEND = "tf-mirrored"
REPLICAS = ("--replicas", "2")
ALONE = {
    "slurm": ("--launcher", "slurm", "--launcher-option", "nodes=1"),
    "mpi": ("--launcher", "mpi", "--launcher-option", "hosts=node2:1"),
    "torchrun": ("--launcher", "torchrun", "--launcher-option", "hosts=node2:1"),
    "horovodrun": ("--launcher", "horovodrun", "--launcher-option", "hosts=node2:1"),
    "ray": ("--launcher", "ray"),
    "kubernetes": ("--launcher", "kubernetes", "--launcher-option", "image=me/train:1"),
    "srun": (),
}
"""What starts it: a launcher with its options, or a scheduler by hand."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one replica of another backend on this machine."""
    return external_job.losses(tmp_path_factory.mktemp("local"), "torch-ddp", 1)


@pytest.mark.parametrize("how", ALONE)
def test_a_single_process_backend_trains_as_on_this_machine(
    bed: TwoHostCluster, local: list[float], how: str
) -> None:
    folder = bed.folder / f"alone-{how}"
    folder.mkdir()
    named: dict[str, Any] = {
        name: f"cluster.external_job:{name}" if name in ("model", "data") else value
        for name, value in external_job.spec().items()
    }
    (folder / "spec.json").write_text(json.dumps(named))
    assert how != "ray" or bed.ray
    run = ["isotrain", "run", str(folder / "spec.json"), "--backend", BACKEND, *REPLICAS]
    run += ["--output", str(folder / "run"), *ALONE[how]]
    if how == "srun":
        run = ["srun", "--nodes=1", "--ntasks=1", *run]
    said = bed.with_ssh.first.check(run, bed.slurm.variables)
    result = isotrain.read_result(folder / "run")
    assert (result.plan["backend"], result.plan["replicas"]) == (BACKEND, 2), said
    np.testing.assert_allclose(result.history.loss, local, rtol=1e-12, atol=0)
