"""Work of a whole run is not repeated by every process that a launcher has started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.in_process import command

import isotrain
from isotrain.core.errors import UnsupportedError
from isotrain.core.planning.cluster_environment import detect_cluster_info

REFUSED = "torchrun has started 2 processes, each of which would do all of it for itself"
SPEC: dict[str, Any] = {
    "name": "small",
    "model": "integration.scheduler_job:model",
    "data": "integration.scheduler_job:data",
    "optimizer": {"name": "sgd", "lr": 0.125},
    "loss": "mean_squared_error",
    "global_batch_size": 4,
    "epochs": 1,
}
BACKENDS = ["torch-ddp", "tf-multiworker"]


@pytest.fixture(autouse=True)
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one that torchrun has started."""
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "2000"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("what", [isotrain.compare, isotrain.parity])
def test_commands_of_several_runs_are_refused_in_ranks(what: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED):
        what(SPEC, backends=BACKENDS)


@pytest.mark.parametrize(
    "given",
    [
        ["compare", "small.json"],
        ["parity", "small.json", "--backend", "torch-ddp", "--replicas", "1,2"],
        ["predict", "run", "--data", "x.npy", "--output", "p.npy"],
        ["export", "run", "--output", "model.onnx"],
    ],
)
def test_commands_that_write_one_file_are_refused_in_ranks(
    given: list[str], tmp_path: Path
) -> None:
    (tmp_path / "small.json").write_text(json.dumps(SPEC))
    done = command(*given, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{given[0]}: {REFUSED}" in done.stderr


def test_rank_0_alone_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model.safetensors"
    assert isotrain.export(tmp_path, target) == target
    assert not target.exists()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(isotrain.IsotrainError):
        isotrain.export(tmp_path, target)


def test_single_processes_are_refused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTRAIN_ENVIRONMENT", "none")
    assert detect_cluster_info() is None
