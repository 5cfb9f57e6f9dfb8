"""Horovod's process sets of a run: those in which its processes communicate, made before it starts."""

from __future__ import annotations

import pytest

from isotrain.adapters.horovod.runtime import subgroups_of
from isotrain.core.contracts.device_mesh import DeviceMesh


@pytest.mark.parametrize("axis", ["stage", "tensor"])
def test_processes_of_a_replica_are_a_set(axis: str) -> None:
    subgroups = set(map(tuple, subgroups_of(DeviceMesh({"data": 2, axis: 3}))))
    assert {(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5)} <= subgroups
