"""Which processes of an elastic run go on, and from whose state."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isotrain.core.contracts.events import (
    EpochEnded,
    Interrupted,
    MembersChanged,
    ProcessEvent,
    Scalars,
    Steps,
)
from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.reporter import Status
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.supervision import handover_folders
from isotrain.core.launching.supervision.elastic_members import ElasticMembers
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus


class Process:
    """What the supervisor sees of a process, and what it is told."""

    is_stopped = False
    status = Status(3, 0.0, "step")
    log = Path("rank.log")

    def __init__(self, rank: int) -> None:
        self.info = ProcessInfo(rank)
        self.exit_code: int | None = None
        self.void: list[int] = []
        self.memberships: list[Membership] = []
        self.received: int | None = None

    @property
    def is_gone(self) -> bool:
        return self.exit_code is not None

    def end(self) -> None:
        self.exit_code = -9

    def void_group(self, generation: int) -> None:
        self.void.append(generation)

    def publish_membership(self, membership: Membership) -> None:
        self.memberships.append(membership)

    def acknowledge(self, first: int) -> None:
        self.received = first


class Run:
    """Four processes that train, and their members."""

    def __init__(self, least: int = 1) -> None:
        self.ports = iter(range(100, 200))
        self.members = ElasticMembers(least, lambda: next(self.ports))
        self.processes: list[Any] = [Process(rank) for rank in range(4)]
        now = time.monotonic()
        self.all = [
            RankStatus(p, last_heard=now, last_active=now, ready=True) for p in self.processes
        ]

    def lose(self, *ranks: int) -> bool:
        for rank in ranks:
            self.processes[rank].exit_code = -9
        return self.members.lose([self.all[rank] for rank in ranks], self.all)

    def interrupted(self, rank: int, done: int, phase: int = 0, generation: int = 0) -> None:
        event = Interrupted(
            generation=generation,
            done=done,
            phase=phase,
            state_bytes=8,
            metrics_bytes=4,
            reason="gone",
        )
        self.note(rank, event)

    def note(self, rank: int, event: ProcessEvent) -> bool:
        return self.members.note(rank, event, self.all)

    def regroup(self) -> MembersChanged | None:
        return self.members.regroup(self.all)


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.members.close()


def test_the_others_regroup_once_all_of_them_wait(run: Run) -> None:
    assert run.regroup() is None
    assert run.lose(2)
    assert [process.void for process in run.processes] == [[0], [0], [], [0]]
    run.note(0, Steps(first=0, losses=[0.5] * 4, learning_rates=[1.0] * 4))
    run.note(0, Scalars(steps=[0, 2], values=[{"a": 1.0}, {"a": 2.0}]))
    for rank, done in ((0, 4), (3, 5)):
        run.interrupted(rank, done)
        assert run.regroup() is None
    run.interrupted(1, 5, phase=1)
    change = run.regroup()
    assert change is not None
    assert list(change.lost) == ["2"]
    assert change.lost["2"].startswith("was ended by SIGKILL")
    assert (change.generation, change.done, change.members) == (1, 5, (0, 1, 3))
    (membership,) = run.processes[0].memberships
    assert (membership.source, membership.phase, membership.reported) == (1, 1, 4)
    assert [process.received for process in run.processes] == [0] * 4
    assert membership.scalars == 3
    assert run.processes[3].memberships == [membership]
    assert run.processes[2].memberships == []
    assert run.regroup() is None


def test_a_process_that_is_lost_while_others_wait_is_no_member(run: Run) -> None:
    run.lose(2)
    run.interrupted(0, 5)
    run.interrupted(1, 4)
    assert run.lose(0)  # it had come furthest
    run.interrupted(3, 4)
    change = run.regroup()
    assert change is not None
    assert set(change.lost) == {"0", "2"}
    assert (change.done, change.members) == (4, (1, 3))
    run.interrupted(1, 9, generation=0)  # of the group before: late
    assert run.regroup() is None


def test_steps_that_are_taken_again_are_reported_again(run: Run) -> None:
    ended = EpochEnded(metrics={}, epoch=0, done=5, loss=0.5)
    assert run.note(0, ended)
    assert not run.note(1, ended)  # by its successor
    run.note(0, Steps(first=0, losses=[0.5] * 5, learning_rates=[1.0] * 5))
    run.lose(0)
    for rank in (1, 2, 3):
        run.interrupted(rank, 4)
    assert run.regroup() is not None
    (membership,) = run.processes[1].memberships
    assert (membership.reported, membership.epochs) == (4, 0)
    assert run.note(1, ended)


def test_a_process_that_has_finished_is_no_member_and_counts_as_there() -> None:
    run = Run(least=3)
    run.all[0].finished = True
    assert run.lose(2)
    for rank in (1, 3):
        run.interrupted(rank, 6)
    change = run.regroup()
    assert change is not None
    assert change.members == (1, 3)
    run.members.close()


def test_a_silent_process_is_ended(run: Run) -> None:
    run.all[1].lost = "fell silent"
    assert run.members.lose([run.all[1]], run.all)
    assert run.processes[1].is_gone
    assert run.all[1].left


def test_too_few_or_an_error_or_an_early_loss_end_the_run() -> None:
    run = Run(least=4)
    assert not run.lose(1)
    run = Run()
    run.all[1].failure = object()  # type: ignore[assignment]
    assert not run.lose(1, 2)
    run = Run()
    run.all[3].ready = False
    assert not run.lose(1)
    assert not any(each.left for each in run.all)
    assert [process.void for process in run.processes] == [[]] * 4


def test_a_group_that_fails_at_once_with_all_members_is_formed_three_times_more(run: Run) -> None:
    for generation in range(4):
        for rank in range(4):
            run.interrupted(rank, 2, generation=generation)
        change = run.regroup()
        assert change is not None
        assert change.lost == {}
    for rank in range(4):
        run.interrupted(rank, 2, generation=4)
    assert run.regroup() is None
    run.interrupted(1, 3, generation=4)
    assert run.regroup() is not None


def test_a_state_that_fits_nowhere_says_who_was_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def free_bytes(parent: Path) -> int:
        asked.append(parent)
        return 0

    monkeypatch.setattr(handover_folders, "free_bytes", free_bytes)
    run.lose(2)
    for rank in (0, 3):
        run.interrupted(rank, 5)
    run.note(
        1, Interrupted(generation=0, done=6, phase=0, state_bytes=100, metrics_bytes=30, reason="")
    )
    with pytest.raises(RunFailedError) as caught:
        run.regroup()
    text = str(caught.value)
    first = text.partition("\n")[0]
    assert first.startswith("rank 2 of 4 was ended by SIGKILL")
    assert first.endswith("at step 3, in call 'step'.")
    needed = 100 + 30 + 2 * 4 + 3 * (1 << 16)
    assert f"the state takes {needed:,} bytes to hand over, and {asked[0]} has 0 free" in text


def test_the_folder_of_the_state_is_removed(run: Run) -> None:
    run.lose(0)
    for rank in (1, 2, 3):
        run.interrupted(rank, 1)
    run.regroup()
    folder = Path(run.processes[1].memberships[0].folder)
    assert folder.is_dir()
    run.members.close()
    assert not folder.exists()


def test_a_state_that_does_not_fit_into_memory_goes_to_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    free = {memory: 4 << 20, disk: 9 << 20}
    monkeypatch.setattr(handover_folders, "SHARED_MEMORY", memory)
    monkeypatch.setattr(handover_folders, "free_bytes", free.__getitem__)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(disk))
    folders = handover_folders.HandoverFolders()
    taken = [Path(folders.take(mebibytes << 20, writers=2)) for mebibytes in (3, 4, 8)]
    assert [each.parent for each in taken] == [memory, disk, disk]
    assert [each.is_dir() for each in taken] == [False, True, True]
    with pytest.raises(
        RunFailedError, match=r"(?s)takes 9,568,256 bytes .*disk has 9,437,184 free"
    ):
        folders.take(9 << 20, writers=2)
    folders.close()
    assert not [*memory.iterdir(), *disk.iterdir()]


_TAKES = """
import sys, time
from pathlib import Path
from isotrain.core.launching.supervision import handover_folders
handover_folders.SHARED_MEMORY = Path(sys.argv[1])
print(handover_folders.HandoverFolders().take(8, writers=1), flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_has_left_is_removed_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _TAKES, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        taken = [Path(each.stdout.readline().strip()) for each in started if each.stdout]
        started[0].kill()
        started[0].wait()
        assert all(each.is_dir() for each in taken)
        monkeypatch.setattr(handover_folders, "SHARED_MEMORY", tmp_path)
        handover_folders.HandoverFolders()
        assert [each.is_dir() for each in taken] == [False, True]
    finally:
        for each in started:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
