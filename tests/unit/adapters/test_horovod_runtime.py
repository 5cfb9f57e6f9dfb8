"""Horovod in a process: the sets of a run's processes that communicate, and the library that it runs over."""

from __future__ import annotations

import pytest

from isotrain.adapters.horovod import runtime
from isotrain.core.contracts.device_mesh import DeviceMesh
from isotrain.core.errors import UnsupportedError


@pytest.mark.parametrize("axis", ["stage", "tensor"])
def test_processes_of_a_replica_are_a_set(axis: str) -> None:
    subgroups = set(map(tuple, runtime.subgroups_of(DeviceMesh({"data": 2, axis: 3}))))
    assert {(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5)} <= subgroups


@pytest.mark.parametrize(("first", "then"), [("gloo", "mpi"), ("mpi", "gloo")])
def test_horovod_stays_with_what_it_has_run_over(
    monkeypatch: pytest.MonkeyPatch, first: str, then: str
) -> None:
    monkeypatch.setattr("isotrain.adapters.horovod.runtime._ProcessState.library", None)
    runtime.use_library(first)
    runtime.use_library(first)
    with pytest.raises(UnsupportedError, match=f"run over {first} in this process, .* over {then}"):
        runtime.use_library(then)
