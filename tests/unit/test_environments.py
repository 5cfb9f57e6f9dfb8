"""The environments that come with isotrain: variables as the engines set them, and the places they tell."""

from __future__ import annotations

import builtins
import io
import os
import socket
from dataclasses import replace
from typing import Any

import pytest

from isotrain.core.contracts.environment import Place
from isotrain.core.errors import PlaceError
from isotrain.core.planning.places import place_of
from isotrain.core.plugins.host import PluginHost

HOST = PluginHost(entry_points=False)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
AT_TORCHRUN = Place(
    engine="torchrun",
    told_by=(),
    rank=3,
    world_size=4,
    job="abc@n01:29500",
    local_rank=1,
    local_world_size=2,
    node_rank=1,
    coordinator="n01",
    restarts=2,
)
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n01", "MASTER_PORT": "2222"}
SBATCH = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n01",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[02-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "n04",
}
AT_SRUN = Place(
    engine="slurm",
    told_by=(),
    rank=4,
    world_size=5,
    job="71.0.0",
    local_rank=0,
    local_world_size=1,
    node_rank=2,
    host="n04",
    hosts=("n02", "n03", "n04"),
    coordinator="n02",
)
HETEROGENEOUS = {
    "SLURM_JOB_ID": "80",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "80",
    "SLURM_JOB_ID_HET_GROUP_1": "81",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n01",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu-a[1-2]-ib",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n01,gpu-a[1-2]-ib",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "gpu-a2-ib",
    "SLURM_RESTART_COUNT": "1",
}
AT_HETEROGENEOUS = Place(
    engine="slurm",
    told_by=(),
    rank=3,
    world_size=5,
    job="80.1.1",
    local_rank=0,
    local_world_size=2,
    node_rank=2,
    host="gpu-a2-ib",
    hosts=("n01", "gpu-a1-ib", "gpu-a2-ib"),
    coordinator="n01",
    restarts=1,
)
CASES: dict[str, tuple[dict[str, str], Place | None]] = {
    "torchrun": (TORCHRUN, AT_TORCHRUN),
    "torchrun without a store of the agents": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
        replace(AT_TORCHRUN, port=29500),
    ),
    "env:// by hand": (
        BY_HAND,
        Place("torchrun", (), 1, 2, "env@n01:2222", coordinator="n01", port=2222),
    ),
    "an address for torch alone": ({"MASTER_ADDR": "n01", "MASTER_PORT": "2222"}, None),
    "srun": (SRUN, AT_SRUN),
    "srun over a heterogeneous job": (HETEROGENEOUS, AT_HETEROGENEOUS),
    "the script of sbatch": (SBATCH, None),
    "the shell of salloc": ({**SRUN, "SLURM_STEP_ID": "4294967290"}, None),
    "torchrun in an srun for each host": ({**SRUN, **TORCHRUN}, AT_TORCHRUN),
    "torchrun in the script of sbatch": ({**SBATCH, **TORCHRUN}, AT_TORCHRUN),
}
HALVES = {
    "torchrun": (TORCHRUN, ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
    "slurm": (
        SRUN,
        [
            *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
            *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_place_is_as_the_engine_says(case: str) -> None:
    variables, expected = CASES[case]
    found = place_of(variables, HOST)
    assert (found and replace(found, told_by=())) == expected
    assert found is None or set(found.told_by) <= set(variables)


@pytest.mark.parametrize(
    ("engine", "missing"),
    [(engine, name) for engine, (_, names) in HALVES.items() for name in names],
)
def test_what_an_engine_never_leaves_out_is_named_when_it_is_missing(
    engine: str, missing: str
) -> None:
    variables = {name: text for name, text in HALVES[engine][0].items() if name != missing}
    with pytest.raises(PlaceError, match=rf"^{engine}: .* set, but not {missing};"):
        place_of(variables, HOST)


def test_every_environment_has_half_set_variables_here() -> None:
    assert set(HALVES) == set(HOST.environments.names())


def test_environments_look_at_nothing_but_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
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
        found = [each.place(variables) for each in environments for variables, _ in CASES.values()]
    assert len([place for place in found if place is not None]) >= len(environments)
