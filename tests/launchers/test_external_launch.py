"""Every launcher and scheduler starts every backend that the tables allow: on two hosts, with one's losses.

What cannot be had here is stood in for: the cluster behind `kubectl`, and schedulers, by their variables. The
backends of a framework are run by the same processes, one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import external_job, simulated_schedulers
from cluster.external_launchers import EXTERNAL_LAUNCHERS, Started
from cluster.launchers import LAUNCHERS, program_command, require_rank_variables, start
from cluster.two_hosts import TwoHostCluster

from isotrain.core.planning import launcher_support
from isotrain.core.plugins.manager import plugin_manager

SECONDS = 250.0
_JOB = str(Path(external_job.__file__))
FRAMEWORKS = {
    "torch": ["torch-ddp", "horovod-torch"],
    "tensorflow": ["tf-multiworker", "horovod-tf"],
}
OVER_MPI = {"torch": ["horovod-torch:mpi"], "tensorflow": ["horovod-tf:mpi"]}
"""In processes of their own: Horovod stays with what it has run over."""
STARTED_BY = {
    "slurm": "slurm",
    "mpi": "openmpi",
    "mpi-hydra": "mpich",
    "torchrun": "torchrun",
    "horovodrun": "horovod",
    "ray": "ray",
    "kubernetes": "kubernetes",
}
"""By launcher: the cluster environment that its ranks detect."""


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one replica on this machine."""
    return external_job.losses(tmp_path_factory.mktemp("local"), "torch-ddp", 1)


def same(started: Started, runs: Sequence[str], local: list[float]) -> list[dict[str, Any]]:
    """What the ranks tell of themselves, once all have made these runs, with the losses of one replica."""
    try:
        statuses = started.wait(SECONDS)
    finally:
        started.end()
    said = started.log.read_text()
    assert not any(statuses), said
    ranks = [json.loads(file.read_text()) for file in started.log.parent.glob("losses-of-*.json")]
    assert len(ranks) == 4, said
    for rank in ranks:
        assert [*rank["losses"]] == runs
        for losses in rank["losses"].values():
            np.testing.assert_allclose(losses, local, rtol=1e-12, atol=0)
    return ranks


def environment_of(run: Path) -> str:
    """What a run was started by, as its ranks found out."""
    return str(json.loads((run / "plan.json").read_text())["launcher"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", STARTED_BY)
def test_losses_are_those_of_one_machine(
    bed: TwoHostCluster, local: list[float], name: str, framework: str
) -> None:
    for backends in (FRAMEWORKS[framework], *([OVER_MPI[framework]] if name == "mpi" else [])):
        folder = bed.folder / f"joined-{name}-{backends[-1].replace(':', '-')}"
        folder.mkdir()
        command = program_command(folder, sys.executable, _JOB, str(folder), ",".join(backends))
        ranks = same(start(bed, name, command), backends, local)
        require_rank_variables(ranks, name, command)
        for backend in backends:
            assert environment_of(folder / backend.replace(":", "-")) == STARTED_BY[name]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_losses_are_equal_under_simulated_environments(
    bed: TwoHostCluster, local: list[float], framework: str
) -> None:
    folder = bed.folder / f"simulated-{framework}"
    folder.mkdir()
    backends, environments = FRAMEWORKS[framework], [*simulated_schedulers.SCHEDULERS]
    job = [bed.python, _JOB, str(folder), ",".join(backends), *environments]
    started = EXTERNAL_LAUNCHERS["srun"].start(bed, job, folder / "log")
    same(started, [f"{each} {backend}" for each in environments for backend in backends], local)
    for environment in environments:
        assert {environment_of(folder / environment / backend) for backend in backends} == {
            environment
        }


def test_every_supported_pair_of_the_tables_is_covered() -> None:
    host = plugin_manager()
    backends = {backend for each in FRAMEWORKS.values() for backend in each}
    environments = {*STARTED_BY.values(), *simulated_schedulers.SCHEDULERS}
    launchers = {LAUNCHERS[name].name for name in STARTED_BY}
    for started, table in (
        (launchers, [each for each in launcher_support.launchers(host) if each["name"] != "local"]),
        (environments, launcher_support.environments(host)),
    ):
        assert {each["name"] for each in table} == started
        for row in table:
            supported = {name for name, pair in row["backends"].items() if pair["supported"]}
            assert supported == {*backends, "numpy"}  # see tests/integration/test_rendezvous.py
