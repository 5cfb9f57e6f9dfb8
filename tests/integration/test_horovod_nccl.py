"""Horovod that is compiled with NCCL, on a machine without a GPU (`make test-nccl`)."""

from __future__ import annotations

from typing import Any

import pytest
from integration import session_specs

import isotrain
from isotrain.adapters.horovod import build_info
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.planning.doctor import examine
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.system import hardware

BUILD = build_info.installed("tensorflow")

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.skipif(
        not (BUILD and BUILD.extension and build_info.has_collective(BUILD.extension, "nccl")),
        reason="this Horovod is built without NCCL (make test-nccl builds one)",
    ),
    pytest.mark.skipif(hardware.visible_gpus() > 0, reason="there are GPUs"),
]


def spec(**fields: Any) -> dict[str, Any]:
    return {**session_specs.spec(), **fields}


def test_it_loads_without_a_driver_and_says_what_is_missing() -> None:
    (backend,) = examine(plugin_manager(), ["horovod-tf"])["backends"]
    collectives = {each["name"]: each for each in backend["collectives"]}
    assert backend["available"], backend["reason"]
    assert collectives["gloo"]["available"]
    assert not collectives["nccl"]["available"]
    assert collectives["nccl"]["reason"] == "no NVIDIA GPU is visible"


def test_a_run_on_gpus_is_refused() -> None:
    with pytest.raises(PlanError, match="'horovod-tf' can use 0 GPUs here"):
        isotrain.plan(spec(device="gpu"), backend="horovod-tf:nccl", replicas=2)
    with pytest.raises(UnsupportedError, match="does not support this run's device, cpu"):
        isotrain.plan(spec(), backend="horovod-tf:nccl", replicas=2)


def test_cpus_train_over_gloo() -> None:
    result = isotrain.run(spec(), backend="horovod-tf", replicas=2, quiet=True)
    assert result.plan["collective"] == "gloo"
