"""What rank 0 makes of the facts of all processes: addresses, local ranks, threads, replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from unit.rendezvous.rendezvous_helpers import LOCAL

from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.planning.cluster_resources import replicas_for
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.rendezvous.consistency import (
    Facts,
    LocalRankAssignment,
)


def facts(host: str, address: str, local: int | None = None, cpus: Sequence[int] = (0, 1)) -> Facts:
    own = {"host": host, "address": address, "local_rank": local, "port": 7, "cpus": [*cpus]}
    return {**own, "gpus": 0}


def resources(*told: Facts) -> list[tuple[Any, ...]]:
    found = LocalRankAssignment(lambda told: "10.0.0.1")(told)["processes"]
    return [(each["host"], each["local_rank"], each["address"]) for each in found]


def test_every_process_gets_an_address_that_all_can_reach() -> None:
    """A client on rank 0's host may have connected by the loopback address."""
    told = (facts("a", ""), facts("a", "127.0.0.1"), facts("b", "10.0.0.2"), facts("b", "10.0.0.2"))
    assert resources(*told) == [
        ("a", 0, "10.0.0.1"),
        ("a", 1, "10.0.0.1"),
        ("b", 0, "10.0.0.2"),
        ("b", 1, "10.0.0.2"),
    ]


def test_local_ranks_are_the_launchers_where_consistent() -> None:
    assert [s[1] for s in resources(facts("a", "", 1), facts("a", "", 0))] == [1, 0]
    assert [s[1] for s in resources(facts("a", "", 0), facts("a", "", 0))] == [0, 1]


def test_cores_are_divided_among_the_processes_of_a_host() -> None:
    bound = [facts("a", "", cpus=(0, 1)), facts("a", "", cpus=(2, 3))]
    free = [facts("a", "", cpus=range(8)), facts("a", "", cpus=range(8))]
    assert LocalRankAssignment(lambda told: LOCAL)(bound)["cores"] == 2
    assert LocalRankAssignment(lambda told: LOCAL)(free)["cores"] == 4


def replicas(
    backend: str, strategy: str, processes: int, asked: int | None = None, **options: Any
) -> int:
    host = plugin_manager()
    chosen = host.backend(backend), host.strategy(strategy, options)
    return replicas_for("slurm", processes, *chosen, asked)


def test_replicas_follow_from_the_processes() -> None:
    assert replicas("torch-ddp", "data-parallel", 4) == 4
    assert replicas("torch-ddp", "parameter-server", 4) == 3  # and a coordinator
    with pytest.raises(PlanError, match="3 were requested, and slurm has started 4"):
        replicas("torch-ddp", "data-parallel", 4, 3)
    with pytest.raises(
        PlanError, match="8 processes, which no number of replicas takes: one takes 3"
    ):
        replicas("torch-ddp", "tensor", 8, degree=3)
    with pytest.raises(UnsupportedError, match="backend 'tf-mirrored' does not join them"):
        replicas("tf-mirrored", "data-parallel", 2)
