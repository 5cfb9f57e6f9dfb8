"""Built-in cluster environments: variables as launchers set them, and the cluster info from them."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from unit.environments.environment_cases import CASES, HALVES, RAY, WRONG

from isotrain.core.contracts.cluster_environment import ClusterEnvironment, ClusterInfo
from isotrain.core.errors import ClusterInfoError
from isotrain.core.planning.cluster_environment import cluster_info_of
from isotrain.core.plugins.manager import PluginManager

HOST = PluginManager(entry_points=False)
RECORDED = sorted((Path(__file__).parents[2] / "launchers" / "recorded").glob("*.json"))
_FIRST = ("node1", "10.77.0.1")
RECORDED_LAUNCHERS: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("srun", "sbatch", "srun-heterogeneous"), ("slurm", *_FIRST)),
    **dict.fromkeys(("torchrun", "torchrun-under-srun", "ray"), ("torchrun", *_FIRST)),
    **dict.fromkeys(("mpirun", "mpirun-in-sbatch", "horovodrun-mpi"), ("openmpi", *_FIRST)),
    "horovodrun": ("horovod", *_FIRST),
    "hydra": ("mpich", None),
}
"""By what was recorded: the environment that knows it, and what it may say of the host of rank 0."""


@pytest.mark.parametrize("case", CASES)
def test_cluster_info_is_as_the_variables_say(case: str) -> None:
    variables, expected = CASES[case]
    found = cluster_info_of(variables, HOST)
    assert (found and replace(found, variables_read=())) == expected
    assert found is None or set(found.variables_read) <= set(variables)


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_every_rank_of_a_recorded_launcher_gets_its_cluster_info(file: Path) -> None:
    ranks = json.loads(file.read_text(encoding="utf-8"))
    infos = [cluster_info_of(rank["variables"], HOST) for rank in ranks]
    if file.stem == "sbatch-script":
        assert infos == [None]
        return
    hosts = [rank["host"] for rank in ranks]
    for index, (cluster_info, host) in enumerate(zip(infos, hosts, strict=True)):
        assert cluster_info is not None
        assert (cluster_info.rank, cluster_info.world_size) == (index, len(ranks))
        assert (cluster_info.local_rank, cluster_info.local_world_size) == (
            hosts[:index].count(host),
            hosts.count(host),
        )
        assert cluster_info.host in (None, host)
        assert cluster_info.node_rank in (None, sorted(set(hosts)).index(host))
        assert cluster_info.coordinator in RECORDED_LAUNCHERS[file.stem][1:]
    assert {cluster_info and cluster_info.environment for cluster_info in infos} == {
        RECORDED_LAUNCHERS[file.stem][0]
    }
    assert len({cluster_info and cluster_info.job for cluster_info in infos}) == 1


def test_ranks_of_open_mpi_share_a_secret() -> None:
    host = PluginManager(entry_points=False)
    told = json.loads((RECORDED[0].parent / "mpirun.json").read_text())[0]["variables"]
    assert host.environment("openmpi").secret(told) == "secret"  # in the place of what it was
    assert host.environment("slurm").secret(told) is None


def test_workers_of_ray_go_on_where_their_program_says_so() -> None:
    """Ray Train ends all workers when one is lost."""
    ray = HOST.environment("ray")
    assert "Ray Train ends all workers" in (ray.why_not_elastic(RAY) or "")
    assert ray.why_not_elastic({**RAY, "ISOTRAIN_RAY_ELASTIC": "1"}) is None


def test_every_recorded_launcher_has_an_environment() -> None:
    assert {file.stem for file in RECORDED} == {*RECORDED_LAUNCHERS, "sbatch-script"}


@pytest.mark.parametrize(
    ("launcher", "missing"),
    [(launcher, name) for launcher, (_, names) in HALVES.items() for name in names],
)
def test_a_missing_required_variable_is_named(launcher: str, missing: str) -> None:
    variables = {name: text for name, text in HALVES[launcher][0].items() if name != missing}
    with pytest.raises(ClusterInfoError, match=rf"^{launcher}: .* set, but not .*\b{missing}\b.*;"):
        HOST.environment(launcher).cluster_info(variables)
    with pytest.raises(ClusterInfoError, match=rf"\b{missing}\b"):
        cluster_info_of(variables, HOST)


def test_every_environment_has_half_set_variables_here() -> None:
    assert {*HALVES, "tf_config"} == set(HOST.environments.names())


def test_every_environment_claims_a_process_here() -> None:
    found = {
        cluster_info.environment for _, cluster_info in CASES.values() if cluster_info is not None
    }
    assert found == set(HOST.environments.names())


@pytest.mark.parametrize("case", WRONG)
def test_impossible_values_are_errors_that_name_the_variable(case: str) -> None:
    variables, message = WRONG[case]
    with pytest.raises(ClusterInfoError, match=re.escape(message)):
        cluster_info_of(variables, HOST)


@given(some.data())
def test_any_variables_give_cluster_info_or_its_error(data: some.DataObject) -> None:
    """Variables of any launchers, some missing and some wrong, raise no other error."""
    cases = data.draw(some.lists(some.sampled_from(sorted(CASES)), min_size=1, max_size=2))
    variables = {name: text for case in cases for name, text in CASES[case][0].items()}
    for name in data.draw(some.lists(some.sampled_from(sorted(variables)), max_size=3)):
        wrong = data.draw(some.sampled_from(["", "-1", "x", "7", "n[", '{"cluster": 1}', '["a"]']))
        variables[name] = wrong
    cluster_info, fault = None, ""
    try:
        cluster_info = cluster_info_of(variables, HOST)
    except ClusterInfoError as error:
        fault = str(error)
    assert cluster_info is None or 0 <= cluster_info.rank < cluster_info.world_size
    assert not fault or any(name in fault for name in variables)


def answer(environment: ClusterEnvironment, variables: dict[str, str]) -> ClusterInfo | None:
    """A launcher that sets only some variables may run inside of another."""
    try:
        return environment.cluster_info(variables)
    except ClusterInfoError:
        return None


def test_environments_read_nothing_but_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = [HOST.environment(name) for name in HOST.environments.names()]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an environment looked beyond its variables")

    class Refusing(dict[str, str]):
        __getitem__ = get = __contains__ = __iter__ = keys = items = refuse  # type: ignore[assignment]

    with monkeypatch.context() as blocked:
        blocked.setattr(os, "environ", Refusing())
        for module, name in (
            *((os, name) for name in ("getenv", "open", "stat", "listdir", "uname")),
            *((builtins, "open"), (io, "open"), (socket, "socket"), (socket, "gethostname")),
        ):
            blocked.setattr(module, name, refuse)
        asked = [(each, variables) for each in environments for variables, _ in CASES.values()]
        found = [answer(each, variables) for each, variables in asked]
    assert {cluster_info.environment for cluster_info in found if cluster_info} == {
        each.name for each in environments
    }
