"""Elastic runs whose processes a scheduler has started: those that are left go on without a lost one."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.external_launch_program import STEP
from integration.test_rendezvous import LAUNCHERS, Started, last_line, local, script

pytestmark = pytest.mark.slow

ELASTIC = {"elastic": {"min": 2}}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def require_undisturbed(started: Started, folder: Path, lost: int, backend: str) -> None:
    """Those that are left have taken every step once, and end as a run from which nothing was lost."""
    expected = local(folder, 3, backend)
    for rank in {0, 1, 2} - {lost}:
        found = last_line(started.said(rank))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)
    (change,) = events(folder, "members changed")
    assert (set(change["lost"]), change["done"]) == ({str(lost)}, STEP + 1)
    assert change["members"] == [rank for rank in range(3) if rank != lost]


@pytest.fixture
def by_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher `script`: a script on this machine that sets what `env://` of PyTorch needs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def told(rank: int, size: int, job: str) -> dict[str, str]:
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    monkeypatch.setitem(LAUNCHERS, "script", told)


@pytest.mark.usefixtures("by_script")
@pytest.mark.parametrize(
    ("launcher", "backend", "rank"),
    [
        ("slurm", "reference", 1),
        pytest.param("slurm", "torch-ddp", 1, marks=pytest.mark.failures),
        pytest.param("script", "horovod-torch", 2, marks=pytest.mark.failures),
        pytest.param("script", "horovod-tf", 1, marks=pytest.mark.failures),
    ],
)
def test_the_others_go_on_without_a_killed_rank(
    tmp_path: Path, launcher: str, backend: str, rank: int
) -> None:
    started = script(launcher, tmp_path, 3, backend=backend, deed="kill", rank=rank, spec=ELASTIC)
    codes = started.ended()
    said = "".join(map(started.said, range(3)))
    assert codes == [-signal.SIGKILL if each == rank else 0 for each in range(3)], said
    require_undisturbed(started, tmp_path, rank, backend)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert any("starts none anew" in note for note in plan["notes"])


@pytest.mark.failures
def test_a_suspended_rank_is_left_behind(tmp_path: Path) -> None:
    fields = {**ELASTIC, "timeouts": {"silence": 3.0}}
    started = script("slurm", tmp_path, 3, deed="stop", rank=2, spec=fields)
    assert started.ended(but=[2])[:2] == [0, 0], started.said(0) + started.said(1)
    require_undisturbed(started, tmp_path, 2, "reference")


@pytest.mark.failures
@pytest.mark.parametrize(
    ("deed", "rank", "expected"),
    [
        ("raise_error", 1, f"rank 1 of 3 on 127.0.0.2 raised ValueError after step {STEP}, "),
        ("kill", 0, "rank 0 is gone: its connection was closed. It was "),
    ],
)
def test_what_ends_an_elastic_run_is_named(
    tmp_path: Path, deed: str, rank: int, expected: str
) -> None:
    started = script("slurm", tmp_path, 3, deed=deed, rank=rank, spec=ELASTIC)
    codes = started.ended()
    assert codes[2] == 1
    assert expected in started.said(2)


@pytest.mark.failures
def test_too_few_are_left(tmp_path: Path) -> None:
    fields = {"elastic": {"min": 3}}
    started = script("slurm", tmp_path, 3, deed="kill", rank=2, spec=fields)
    assert started.ended()[:2] == [1, 1]
    for rank in range(2):
        assert "rank 2 of 3 on 127.0.0.3 is gone" in started.said(rank)


def test_torchrun_says_what_to_use_instead(tmp_path: Path) -> None:
    started = script("torchrun", tmp_path, spec={"elastic": {"min": 1}})
    assert started.ended() == [1, 1]
    for rank in range(2):
        assert "torchrun ends all processes when one is lost" in started.said(rank)
        assert "--resume auto" in started.said(rank)
