"""Processes that a launcher has started find each other, train in one run, and end it together."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.certificates import Authority
from helpers.in_process import command
from integration import external_launch_program
from integration.external_launch_program import STEP

import isotrain
from isotrain.core.contracts.events import EpochEnded

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("external_launch_program.py")
LIMIT_SECONDS = 60.0
"""Within which a run ends after 5 s of silence, also where few of these are its processors'."""
PATIENCE_SECONDS = 400.0
"""For processes to end at all: a busy machine takes minutes to import frameworks."""
Variables = Mapping[str, str]


def torchrun(rank: int, size: int, job: str) -> dict[str, str]:
    """What torchrun sets on one host."""
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    others = {"GROUP_RANK": 0, "MASTER_PORT": 29500, "TORCHELASTIC_RESTART_COUNT": 0}
    told = {name: str(value) for name, value in {**own, **others}.items()}
    elastic = {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**told, **elastic, "MASTER_ADDR": "127.0.0.1"}


def slurm(rank: int, size: int, job: str) -> dict[str, str]:
    """What `srun` sets for one task on each of several hosts, which are addresses of this machine."""
    hosts = [f"127.0.0.{number}" for number in range(1, size + 1)]
    numbers = {"PROCID": rank, "LOCALID": 0, "NODEID": rank, "STEP_NUM_TASKS": size, "STEP_ID": 0}
    told = {f"SLURM_{name}": str(value) for name, value in numbers.items()}
    step = {"SLURM_STEP_NODELIST": ",".join(hosts), "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})"}
    own = {"SLURMD_NODENAME": hosts[rank], "ISOTRAIN_INTERFACE": hosts[rank]}
    return {**told, **step, **own, "SLURM_JOB_ID": job}


LAUNCHERS = {"torchrun": torchrun, "slurm": slurm}
ALIKE = {"PYTHONUNBUFFERED": "", "ISOTRAIN_KEY": "of this test alone"}
"""What all processes find set: the first as launchers leave it."""


class Started:
    """Processes of a run, started as a launcher starts them.

    Attributes:
        folder: With their files, and what each of them says.
        processes: By rank.
    """

    def __init__(
        self,
        launcher: str,
        size: int,
        command: Sequence[str],
        folder: Path,
        variables: Variables | None = None,
    ) -> None:
        job = f"{folder.name}-{time.time_ns()}"
        self.folder = folder
        self.processes = [
            self._start(
                rank, command, {**LAUNCHERS[launcher](rank, size, job), **(variables or {})}
            )
            for rank in range(size)
        ]

    def _start(
        self, rank: int, command: Sequence[str], variables: Variables
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"out-{rank}").open("w") as out:
            return subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **ALIKE, **variables},
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def await_file(self, path: Path, text: str = "") -> None:
        """Returns when it has a text, however busy the machine is; or when a process has ended."""
        while not (path.exists() and text in path.read_text()) and all(
            process.poll() is None for process in self.processes
        ):
            time.sleep(0.05)

    def ended(self, *, but: Sequence[int] = ()) -> list[int | None]:
        """Exit codes; those of `but` are killed once the others have ended."""
        try:
            for rank, process in enumerate(self.processes):
                if rank not in but:
                    process.wait(PATIENCE_SECONDS)
        finally:
            self.kill()
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """Ends those that still run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, rank: int) -> str:
        return (self.folder / f"out-{rank}").read_text()


def script(launcher: str, folder: Path, size: int = 2, **asked: Any) -> Started:
    asked = {"backend": "reference", "run": str(folder / "run"), **asked}
    asked["moment"] = str(folder / "moment")
    return Started(launcher, size, [str(PROGRAM), json.dumps(asked)], folder)


def local(folder: Path, size: int = 2, backend: str = "reference", **spec: Any) -> dict[str, Any]:
    """The weights and the loss of the same run, all on this machine."""
    asked = {"backend": backend, "run": str(folder / "local"), "spec": spec}
    with mock.patch.object(sys, "argv", [str(PROGRAM), json.dumps(asked)]):
        returned = isotrain.launch(
            external_launch_program.work,
            external_launch_program.spec(**spec),
            backend=backend,
            replicas=size,
            output=folder / "local",
            on_event=lambda event: None,
        )
    found: dict[str, Any] = json.loads(external_launch_program.shown(returned[0]))
    return found


def last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("launcher", "size", "encrypts"), [("torchrun", 2, True), ("slurm", 3, False)]
)
def test_an_externally_started_run_has_the_bits_of_a_local_one(
    launcher: str, size: int, encrypts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypts:
        monkeypatch.setenv("ISOTRAIN_TLS", Authority().folder(tmp_path / "tls"))
    started = script(launcher, tmp_path, size)
    codes = started.ended()
    assert codes == [0] * size, started.said(0) + started.said(1)
    expected = local(tmp_path, size)
    for rank in range(size):
        assert last_line(started.said(rank)) == expected
    run = tmp_path / "run"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for kind in ("started", "ready", "finished"):
        assert sorted(e["rank"] for e in events if e["event"] == kind) == list(range(size))
    assert f"printed by rank {size - 1}" in (run / f"rank-{size - 1}.log").read_text()
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["launcher"], plan["replicas"]) == (launcher, size)
    assert any("travel encrypted" in each for each in plan["notes"]) is encrypts
    assert len({each["host"] for each in plan["processes"]}) == (1 if launcher == "torchrun" else 3)


def test_all_say_that_rank_0_cannot_encrypt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(tmp_path / "missing"), Authority().folder(tmp_path / "tls")]

    def told(rank: int, size: int, job: str) -> dict[str, str]:
        return {**torchrun(rank, size, job), "ISOTRAIN_TLS": folders[rank]}

    monkeypatch.setitem(LAUNCHERS, "torchrun", told)
    started = script("torchrun", tmp_path)
    assert started.ended() == [1, 1]
    for rank in range(2):
        assert f"ISOTRAIN_TLS: {folders[0]}/ca.crt cannot be read" in started.said(rank)


SILENT = [("stop", 1), ("hang", 1), ("stop", 0)]
"""Deeds after which the others wait, and by which rank."""


def with_a_deed(deed: str, rank: int, folder: Path) -> Started:
    timeouts = {"silence": 5.0, "progress": 5.0 if deed == "hang" else LIMIT_SECONDS}
    fields = {"timeouts": timeouts, "epochs": 2000}
    return script("slurm", folder, deed=deed, rank=rank, spec=fields, pause=0.05)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], Started]]:
    """Runs that end after seconds in which nothing happens: each is begun while those before it wait."""
    found = {}
    try:
        for deed, rank in SILENT:
            folder = tmp_path_factory.mktemp("silent")
            found[deed, rank] = with_a_deed(deed, rank, folder)
            found[deed, rank].await_file(folder / "moment")
        yield found
    finally:
        for started in found.values():
            started.kill()


@pytest.mark.parametrize(
    ("deed", "rank", "expected"),
    [
        ("crash", 1, "rank 1 of 2 on 127.0.0.2 is gone: its connection to rank 0 was closed "),
        ("raise_error", 1, f"rank 1 of 2 on 127.0.0.2 raised ValueError after step {STEP}, "),
        ("raise_error", 0, f"rank 0 of 2 on 127.0.0.1 raised ValueError after step {STEP}, "),
        ("stop", 1, "rank 1 of 2 on 127.0.0.2 fell silent: nothing was received from it for "),
        ("hang", 1, "rank 1 of 2 on 127.0.0.2 made no progress for "),
        ("kill", 0, "rank 0 is gone: its connection was closed. It was "),
        ("stop", 0, "rank 0 fell silent: nothing was received from it for "),
    ],
)
@pytest.mark.failures
def test_a_rank_that_ends_the_run_is_named_by_all(
    deed: str,
    rank: int,
    expected: str,
    tmp_path: Path,
    silent: dict[tuple[str, int], Started],
) -> None:
    started = silent.get((deed, rank)) or with_a_deed(deed, rank, tmp_path)
    codes = started.ended(but=[] if deed in ("raise_error", "hang") else [rank])
    other = 1 - rank
    assert codes[other] == 1
    text = started.said(other)
    assert expected in text
    assert "in call 'between calls'" in text or rank == 0
    if deed == "crash":
        assert "native code says why\nFatal Python error: Segmentation fault" in started.said(rank)
    if deed == "raise_error":
        assert "ValueError: a deliberate mistake" in text
        assert expected in started.said(rank)
    if rank and deed != "hang":
        assert re.search(rf"after step [1-{STEP}], in call 'between calls'\.", text)


def test_a_killed_rank_is_named_though_the_launcher_ends_all(tmp_path: Path) -> None:
    """A process that crashes is reported alike."""
    started = script("slurm", tmp_path, 3, deed="kill", rank=2, spec={"epochs": 2000}, pause=0.05)
    started.processes[2].wait(PATIENCE_SECONDS)
    for process in started.processes[:2]:
        process.send_signal(signal.SIGTERM)
    codes = started.ended()
    text = started.said(0)
    assert (
        "rank 2 of 3 on 127.0.0.3 is gone: its connection to rank 0 was closed after step" in text
    )
    assert codes[0] == 1


FAILS_TO_START = f"""
import os, sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import external_launch_program
import horovod.torch

def init(*arguments, **options):
    raise ValueError("as the test wants it.")

if os.environ["RANK"] != "0":
    horovod.torch.init = init
external_launch_program.main()
"""


@pytest.mark.failures
def test_rank_0_ends_though_its_horovod_still_waits_for_others(tmp_path: Path) -> None:
    """Horovod gives up after `progress`, and so does the function that it calls when a process exits."""
    fields = {"timeouts": {"progress": 10 * PATIENCE_SECONDS}}
    asked = {"backend": "horovod-torch", "run": str(tmp_path / "run"), "spec": fields}
    started = Started("torchrun", 2, ["-c", FAILS_TO_START, json.dumps(asked)], tmp_path)
    assert started.ended() == [1, 1]
    for rank in range(2):
        assert "Horovod could not start on rank 1 of 2: as the test wants it." in started.said(rank)


def test_differing_arguments_are_named_by_all(tmp_path: Path) -> None:
    other = {"optimizer": {"name": "sgd", "lr": 0.5}}
    started = script("slurm", tmp_path, of={"1": other})
    assert started.ended() == [1, 1]
    for rank in range(2):
        assert "rank 1: spec.optimizer.lr is 0.5, on rank 0 0.125" in started.said(rank)


def test_a_rank_with_more_data_is_named_before_the_first_step(tmp_path: Path) -> None:
    started = script("slurm", tmp_path, samples={"1": 72})
    assert started.ended() == [1, 1]
    for rank in range(2):
        text = started.said(rank)
        assert "rank 1 on 127.0.0.2 has 72 training samples where rank 0 has 64" in text
        assert "before its first step" in text


FIELDS: dict[str, Any] = {
    "name": "rendezvous",
    "model": {"numpy": f"{PROGRAM}:network"},
    "data": f"{PROGRAM}:data",
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.125},
    "precision": "float64",
    "global_batch_size": 8,
    "plugins": ["isotrain.testing.reference"],
}
COMMAND = ["-m", "isotrain", "run", "spec.json", "--backend", "reference"]


def test_the_command_line_rendezvous_saves_and_resumes(tmp_path: Path) -> None:
    fields = {**FIELDS, "checkpoint": {"every_steps": 2}}
    losses = []
    for epochs in (1, 2):
        (tmp_path / "spec.json").write_text(json.dumps({**fields, "epochs": epochs}))
        more = ["--output", "run", "--resume", "auto"]
        started = Started("torchrun", 2, [*COMMAND, *more], tmp_path)
        assert started.ended() == [0, 0], started.said(0) + started.said(1)
        losses.append(isotrain.read_result(tmp_path / "run").last_loss)
    assert "resumed after step 8" in started.said(0)
    assert losses[1] == pytest.approx(local(tmp_path)["loss"], rel=1e-12)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_numpy_backend_rendezvous(tmp_path: Path, launcher: str) -> None:
    """It is in the wheel for first tries, and in the tables of launchers."""
    (tmp_path / "spec.json").write_text(json.dumps({**FIELDS, "epochs": 2}))
    numpy = ["-m", "isotrain", "run", "spec.json", "--backend", "numpy", "--output", "run"]
    started = Started(launcher, 2, numpy, tmp_path)
    assert started.ended() == [0, 0], started.said(0) + started.said(1)
    loss = isotrain.read_result(tmp_path / "run").last_loss
    assert loss == pytest.approx(local(tmp_path)["loss"], rel=1e-12)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_the_numpy_backend_under_mpirun(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({**FIELDS, "epochs": 2}))
    numpy = ("run", "spec.json", "--backend", "numpy", "--launcher", "mpi", "--replicas", "2")
    done = command(*numpy, "--output", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = isotrain.read_result(tmp_path / "run")
    assert result.plan["launcher"] == "mpi"
    assert result.last_loss == pytest.approx(local(tmp_path)["loss"], rel=1e-12)


def test_restarts_are_left_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank says so before it waits for others."""
    (tmp_path / "spec.json").write_text(json.dumps({**FIELDS, "epochs": 1}))
    for name, value in torchrun(1, 2, "restarted").items():
        monkeypatch.setenv(name, value)
    done = command(*COMMAND[2:], "--max-restarts", "1", folder=tmp_path)
    assert done.returncode == 2
    assert "was started by torchrun, which alone can start it again" in done.stderr


def training(folder: Path) -> Started:
    """Two processes that train for ever, and save when they are asked to end: both are in their loop."""
    policy = {"every_steps": 10_000_000}
    (folder / "spec.json").write_text(json.dumps({**FIELDS, "epochs": 10**6, "checkpoint": policy}))
    started = Started("torchrun", 2, [*COMMAND, "--output", "run"], folder)
    started.await_file(folder / "run" / "events.jsonl", f'"event": "{EpochEnded.kind}"')
    return started


def test_a_killed_rank_is_named_though_all_were_asked_to_end(tmp_path: Path) -> None:
    started = training(tmp_path)
    started.processes[1].kill()
    started.processes[0].send_signal(signal.SIGTERM)
    assert started.ended(but=[1])[0] == 1, started.said(0)
    assert "rank 1 of 2 is gone: its connection to rank 0 was closed" in started.said(0)


def test_an_interrupt_of_the_launcher_ends_all_after_a_checkpoint(tmp_path: Path) -> None:
    started = training(tmp_path)
    for process in started.processes:
        process.send_signal(signal.SIGINT)
    assert started.ended() == [130, 130], started.said(0) + started.said(1)
    assert list((tmp_path / "run" / "checkpoints").glob("*"))
    assert '"error": "EndedError"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_framework_backend_runs_by_rendezvous(tmp_path: Path) -> None:
    """Other backends run under the real launchers, in tests/launchers."""
    started = script("torchrun", tmp_path, backend="tf-multiworker")
    assert started.ended() == [0, 0], started.said(0) + started.said(1)
    expected = local(tmp_path, backend="tf-multiworker")
    for rank in range(2):
        assert last_line(started.said(rank)) == expected


def test_a_mirrored_backend_is_refused(tmp_path: Path) -> None:
    started = script("torchrun", tmp_path, backend="tf-mirrored")
    assert started.ended() == [1, 1]
    for rank in range(2):
        assert re.search("backend 'tf-mirrored' does not join", started.said(rank))
