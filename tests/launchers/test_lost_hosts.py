"""A run whose host is lost goes on without it, on real launchers, from its last checkpoint or in memory."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from cluster.hosts import end
from cluster.two_hosts import TwoHostCluster, two_hosts
from helpers.waiting import wait_until
from integration import scheduler_job

import isotrain

SPEC = scheduler_job.SLOW | {
    "name": "fewer",
    "epochs": 6,
    "min_replicas": 2,
    "checkpoint": {"every_steps": 2},
    "timeouts": {"silence": 5},
}
"""24 steps, of a quarter of a second each."""
STEPS, MORE_EPOCHS = 24, 40
"""Steps of `SPEC`, and epochs of a run that also awaits a process in place of a lost one."""
LIMIT_SECONDS = 60.0
"""For a host to be missed (5), a launcher that waits for it to be ended (15), and a busy machine."""
SECONDS = 90.0
OPTIONS = {
    "slurm": ("nodes=2", "tasks_per_node=2"),
    "mpi": ("hosts=node1:2,node2:2",),
    "torchrun": ("hosts=node1:2,node2:2",),
    "horovodrun": ("hosts=node1:2,node2:2",),
}
ELASTIC = {"slurm": OPTIONS["slurm"], "ray": ("workers=4",)}
"""Launchers under which ranks go on without those of a lost host, and their options."""


@dataclass(frozen=True)
class Ended:
    """A run that has lost a host and ended.

    Attributes:
        events: That it has told.
        losses: Of all its steps.
        log: What was said.
    """

    events: Sequence[dict[str, Any]]
    losses: Sequence[float]
    log: str

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [event for event in self.events if event["event"] == kind]


class Trial:
    """A run on two hosts of its own, of which the second is lost.

    Attributes:
        bed: The hosts.
        log: What is said there.
    """

    def __init__(self, bed: TwoHostCluster) -> None:
        self.bed = bed
        self.log = bed.folder / "log"
        self._spec = bed.folder / "spec.json"
        self._spec.write_text(json.dumps(SPEC))

    def command(self, *options: str) -> list[str]:
        """The command that trains."""
        run = ["isotrain", "run", str(self._spec), "--backend", "reference", "--json"]
        return [*run, "--output", str(self.bed.folder / "run"), *options]

    def events(self) -> list[dict[str, Any]]:
        """Events of the run so far."""
        file = self.bed.folder / "run" / "events.jsonl"
        return [*map(json.loads, file.read_text().splitlines())] if file.exists() else []

    def has_told(self, kind: str) -> bool:
        """Whether there was an event of a kind."""
        return any(event["event"] == kind for event in self.events())

    def has_replaced(self) -> bool:
        """Whether a process has joined."""
        return any(event.get("joined") for event in self.events())

    def has_saved(self) -> bool:
        """Whether there is a checkpoint."""
        return any(self.bed.folder.glob("run/**/manifest.json"))

    def lose_link(self) -> None:
        """Nobody is told."""
        self.bed.network.unplug(self.bed.network.hosts[1])

    def ended(self) -> Ended:
        """What became of it."""
        losses = isotrain.read_result(self.bed.folder / "run").history.loss
        return Ended(self.events(), losses, self.log.read_text())


def on_hosts_of_its_own(scenario: Callable[[Trial], None]) -> Ended:
    """What becomes of a run; when it fails, what it has said."""
    with two_hosts() as bed:
        trial = Trial(bed)
        try:
            scenario(trial)
            return trial.ended()
        except Exception as error:
            raise AssertionError(f"{error!r}: {trial.log.read_text()}") from error


def driven(trial: Trial, launcher: str) -> None:
    """Started from here, and started again from here."""
    bed = trial.bed.with_ssh
    chosen = [part for option in OPTIONS[launcher] for part in ("--launcher-option", option)]
    run = trial.command("--launcher", launcher, *chosen, "--max-restarts", "1")
    variables = bed.slurm.variables if launcher == "slurm" else {}
    process = bed.first.start(run, trial.log, variables)
    try:
        wait_until(trial.has_saved, SECONDS)
        trial.lose_link()
        wait_until(lambda: trial.has_told("restarted"), LIMIT_SECONDS, "the host is not missed")
        assert process.wait(SECONDS) == 0
    finally:
        end(process)


def remaining(trial: Trial, launcher: str) -> None:
    """Started from here, elastic: first a task is killed, and replaced; then the other host is lost."""
    chosen = [part for option in ELASTIC[launcher] for part in ("--launcher-option", option)]
    fields = ("elastic.min=1", "elastic.replacements=1", f"epochs={MORE_EPOCHS}")
    changes = [part for field in fields for part in ("--set", field)]
    run = trial.command("--launcher", launcher, *chosen, *changes)
    assert launcher != "ray" or trial.bed.ray
    variables = trial.bed.slurm.variables if launcher == "slurm" else {}
    process = trial.bed.first.start(run, trial.log, variables)
    changed = "members changed"
    try:
        wait_until(trial.has_saved, SECONDS)
        second = trial.bed.network.hosts[1]
        second.check(["pkill", "--oldest", "--signal", "KILL", "--full", "--", "-m isotrain run"])
        wait_until(lambda: trial.has_told(changed), LIMIT_SECONDS, "the task is not missed")
        wait_until(trial.has_replaced, LIMIT_SECONDS, "the task is not replaced")
        trial.lose_link()
        assert process.wait(SECONDS) == 0
    finally:
        end(process)


def elastic(trial: Trial) -> None:
    """Started by an agent on each host, which start all ranks again on their own."""
    agents = [
        host.start([*torchrun(trial.bed), *trial.command("--resume", "auto")], trial.log)
        for host in trial.bed.network.hosts
    ]
    try:
        wait_until(trial.has_saved, SECONDS)
        second = trial.bed.network.hosts[1]
        second.check(["pkill", "--oldest", "--signal", "KILL", "--full", "--", "-m isotrain run"])
        wait_until(lambda: trial.has_told("resumed"), SECONDS, "it does not start again")
        trial.lose_link()
        assert agents[0].wait(SECONDS) == 0
    finally:
        for agent in agents:
            end(agent)


def torchrun(bed: TwoHostCluster) -> list[str]:
    """An agent for one host or two."""
    size = ("--nnodes=1:2", "--nproc-per-node=2", "--rdzv-id=run7", "--max-restarts=3")
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={bed.first.name}:29400")
    soon = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
    return [bed.python, "-m", "torch.distributed.run", *size, *meeting, soon, "--no-python"]


SCENARIOS: dict[str, Callable[[Trial], None]] = {
    **{name: functools.partial(driven, launcher=name) for name in OPTIONS},
    "elastic": elastic,
    **{f"remaining-{name}": functools.partial(remaining, launcher=name) for name in ELASTIC},
}


@pytest.fixture(scope="module")
def runs(bed: TwoHostCluster) -> Iterator[dict[str, Future[Ended]]]:
    """All runs at once: they mostly wait."""
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(on_hosts_of_its_own, each) for name, each in SCENARIOS.items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one replica on this machine, of the longest of these runs."""
    local = {name: value for name, value in SPEC.items() if name != "checkpoint"}
    result = isotrain.run(
        {**local, "data": "integration.scheduler_job:data", "epochs": MORE_EPOCHS},
        backend="reference",
        output=tmp_path_factory.mktemp("local") / "run",
        on_event=lambda event: None,
    )
    return list(result.history.loss)


@pytest.mark.parametrize("launcher", OPTIONS)
def test_a_launched_run_continues_without_a_lost_host(
    runs: dict[str, Future[Ended]], expected: list[float], launcher: str
) -> None:
    ended = runs[launcher].result()
    (restarted,) = ended.of_kind("restarted")
    assert re.search("rank [23] of 4 on node2 fell silent", restarted["failure"]), ended.log
    assert restarted["replicas"] == 2
    assert ended.losses == pytest.approx(expected[:STEPS], rel=1e-12)


def test_torchrun_restarts_a_run_with_all_hosts_and_with_fewer(
    runs: dict[str, Future[Ended]], expected: list[float]
) -> None:
    ended = runs["elastic"].result()
    killed, lost = ended.of_kind("resumed")
    assert killed["changes"] == []
    assert "replicas" in str(lost["changes"])
    assert ended.losses == pytest.approx(expected[:STEPS], rel=1e-12)


@pytest.mark.parametrize("launcher", ELASTIC)
def test_ranks_go_on_without_a_lost_one_and_a_lost_host(
    runs: dict[str, Future[Ended]], expected: list[float], launcher: str
) -> None:
    ended = runs[f"remaining-{launcher}"].result()
    assert not ended.of_kind("restarted")
    lost = [each["lost"] for each in ended.of_kind("members changed")]
    joined = [rank for each in ended.of_kind("members changed") for rank in each["joined"]]
    assert joined == [4], ended.log
    # the one that has come may be on either host
    assert {int(rank) for each in lost for rank in each} - {4} == {2, 3}, ended.log
    assert "is gone" in str(lost[0])
    assert "fell silent" in str(lost[-1])
    assert ended.losses == pytest.approx(expected, rel=1e-12)
