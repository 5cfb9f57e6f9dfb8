"""Elastic runs whose processes a scheduler has started: those that are left go on without a lost one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from integration import external_launch_program
from integration.external_launch_program import MODEL, STEP
from integration.test_rendezvous import (
    ALIKE,
    LAUNCHERS,
    PATIENCE_SECONDS,
    Started,
    last_line,
    local,
    script,
)

import isotrain

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
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
    assert any("`isotrain join` on another host" in note for note in plan["notes"])


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


class Joiner:
    """A process of `isotrain join`, as a person starts it on a host of its own.

    Attributes:
        process: The process.
    """

    def __init__(self, folder: Path, number: int = 3, samples: int = 64, after: str = ".") -> None:
        own = {"ISOTRAIN_INTERFACE": f"127.0.0.{number}", "PYTHONPATH": str(TESTS)}
        own |= {"SAMPLES": str(samples), "DATA_AFTER": after}
        self._out = folder / f"joiner-{number}"
        with self._out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "isotrain", "join", str(folder / "run")],
                env={**os.environ, **ALIKE, **own},
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what it has printed."""
        return self.process.wait(PATIENCE_SECONDS), self._out.read_text()


def commands(
    folder: Path,
    backend: str = "reference",
    launcher: str = "slurm",
    program_words: Sequence[str] = ("-m", "isotrain"),
    **changes: Any,
) -> Started:
    """Two ranks of `isotrain run` that a scheduler has started."""
    program = "integration.external_launch_program"
    fields: dict[str, Any] = {
        **external_launch_program.spec(epochs=20, elastic={"min": 1, "max": 3}),
        "model": {name: f"{program}:{each.__name__}" for name, each in MODEL.items()},
        "data": f"{program}:data",
        "callbacks": [f"{program}:AwaitsNewcomer"],
    }
    (folder / "spec.json").write_text(json.dumps(fields | changes))
    words = [*program_words, "run", "spec.json", "--backend", backend, "--output", "run"]
    return Started(launcher, 2, words, folder, {"PYTHONPATH": str(TESTS)})


def final_weights(run: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(run / "weights.safetensors")


def require_equal_weights(found: Path, folder: Path, backend: str) -> None:
    """The weights of a run are those of one in which the same steps were taken undisturbed."""
    isotrain.run(
        external_launch_program.spec(epochs=20),
        backend=backend,
        replicas=3,
        output=folder / "undisturbed",
        quiet=True,
    )
    expected = final_weights(folder / "undisturbed")
    weights = final_weights(found)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.usefixtures("by_script")
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        ("slurm", "reference"),
        pytest.param("slurm", "torch-ddp", marks=pytest.mark.failures),
        pytest.param("script", "horovod-torch", marks=pytest.mark.failures),
        pytest.param("script", "horovod-tf", marks=pytest.mark.failures),
    ],
)
def test_a_process_joins_from_elsewhere(tmp_path: Path, launcher: str, backend: str) -> None:
    started = commands(tmp_path, backend, launcher)
    started.await_file(tmp_path / "run" / "join.json")
    assert (tmp_path / "run" / "join.json").stat().st_mode & 0o777 == 0o600
    joiner = Joiner(tmp_path, 3 if launcher == "slurm" else 1)
    codes = started.ended()
    code, said = joiner.ended()
    assert (codes, code) == ([0, 0], 0), started.said(0) + started.said(1) + said
    (change,) = events(tmp_path, "members changed")
    assert (change["lost"], change["joined"], change["members"]) == ({}, [2], [0, 1, 2])
    assert said.splitlines() == [
        "rank 2 starts",
        f"rank 2 has joined: 3 replicas go on after step {change['done']}",
        "the run has ended",
    ]
    assert not (tmp_path / "run" / "join.json").exists()
    require_equal_weights(tmp_path / "run", tmp_path, backend)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_others_go_on_when_a_process_that_has_joined_is_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "hold").touch()
    started = commands(tmp_path, checkpoint={"every_epochs": 1})
    started.await_file(tmp_path / "run" / "join.json")
    joiner = Joiner(tmp_path)
    started.await_file(tmp_path / "joiner-3", "has joined")
    joiner.process.send_signal(number)
    code, said = joiner.ended()
    (tmp_path / "hold").unlink()
    assert started.ended() == [0, 0], started.said(0) + said
    assert code not in (0, 1)
    assert "Traceback" not in said
    joined, left = events(tmp_path, "members changed")
    assert (joined["joined"], [*left["lost"]], left["members"]) == ([2], ["2"], [0, 1])
    require_equal_weights(tmp_path / "run", tmp_path, "reference")


BEATS_FIRST = """
import sys
from unittest import mock
from isotrain.core.cli.main import main
from isotrain.core.rendezvous import rank_zero

made = rank_zero.RemoteProcess

def after_a_beat(channel, *rest):
    channel.send({"do": "beat", "step": None, "call": "start"})
    return made(channel, *rest)

with mock.patch.object(rank_zero, "RemoteProcess", after_a_beat):
    sys.exit(main())
"""


def test_a_heartbeat_may_come_before_the_answer(tmp_path: Path) -> None:
    started = commands(tmp_path, program_words=("-c", BEATS_FIRST))
    started.await_file(tmp_path / "run" / "join.json")
    code, said = Joiner(tmp_path).ended()
    started.kill() if code else started.ended()
    assert code == 0, said


def test_the_run_ends_before_a_process_has_joined(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    started = commands(tmp_path, callbacks=["integration.external_launch_program:Holds"])
    started.await_file(tmp_path / "run" / "join.json")
    joiner = Joiner(tmp_path, after=str(tmp_path / "run" / "result.json"))
    started.await_file(tmp_path / "joiner-3", "starts")
    (tmp_path / "hold").unlink()
    assert started.ended() == [0, 0], started.said(0)
    code, said = joiner.ended()
    assert (code, "the run has ended before this process joined it" in said) == (2, True), said


def test_what_keeps_a_process_from_joining_is_named(tmp_path: Path) -> None:
    """The process has other data, or the run is gone without having removed its address."""
    started = commands(tmp_path, elastic={"min": 1, "max": 3})
    key = tmp_path / "run" / "join.json"
    started.await_file(key)
    address = key.read_text()
    other = Joiner(tmp_path, 4, samples=60)
    code, said = other.ended()
    assert code == 2
    assert "rank 2, which was to join the run, has 60 training samples" in said, said
    # as where a launcher has started the ranks, and an earlier start of them was killed
    rank_zero = tmp_path / "run" / "launcher" / "start-2"
    rank_zero.mkdir(parents=True)
    for name in ("spec.json", "join.json"):
        shutil.copy(tmp_path / "run" / name, rank_zero)
    key.write_text(address.replace("127.0.0.1", "127.0.0.9"))
    os.utime(key, (0, 0))
    joiner = Joiner(tmp_path, 3)
    started.await_file(tmp_path / "joiner-3", "has joined")
    assert joiner.ended()[0] == 0
    assert started.ended() == [0, 0], started.said(0)
    (rank_zero / "join.json").unlink()
    key.write_text(address)  # as of a run that was killed
    code, said = Joiner(tmp_path, 4).ended()
    assert code == 1
    assert "rank 0 does not answer at port" in said
