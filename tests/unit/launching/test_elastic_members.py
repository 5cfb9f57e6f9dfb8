"""Which processes of an elastic run go on, and from whose state."""

from __future__ import annotations

import errno
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.core.contracts.events import (
    EpochEnded,
    Event,
    Failed,
    Interrupted,
    LauncherNote,
    MembersChanged,
    ProcessEvent,
    Ready,
    Scalars,
    Steps,
    Waiting,
)
from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.process import ProcessContext, ProcessInfo
from isotrain.core.contracts.reporter import Status
from isotrain.core.errors import CheckpointError, RunFailedError
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.launching.supervision import handover_folders
from isotrain.core.launching.supervision.elastic_members import ElasticMembers
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus
from isotrain.core.launching.supervision.newcomers import Newcomers
from isotrain.core.spec.sections import Elastic


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
        self.asked = 0
        self.context = ProcessContext(rank, 4, "run", (self.info,), ())
        self.address = (f"10.0.0.{rank}", 50 + rank)

    @property
    def is_gone(self) -> bool:
        return self.exit_code is not None

    def end(self) -> None:
        self.exit_code = -9

    def void_group(self, generation: int) -> None:
        self.void.append(generation)

    def publish_membership(self, membership: Membership) -> None:
        self.memberships.append(membership)

    def request_regroup(self) -> None:
        self.asked += 1

    def acknowledge(self, first: int) -> None:
        self.received = first


class PortsOf(Ports):
    """Ports from 100 on."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self._next = iter(range(100, 200))

    def take(self, count: int, first: int | None = None) -> tuple[int, ...]:
        return tuple(next(self._next) for _ in range(count))

    def release(self, port: int) -> None:
        self.released.append(port)


class Asks:
    """A program that asks for a further replica, and what it is answered."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.is_closed = False

    def answer(self, fields: Any) -> None:
        assert not self.is_closed
        self.answers.append(fields)

    def close(self) -> None:
        self.is_closed = True


class Run:
    """Four processes that train, and their members."""

    def __init__(
        self, head_start: float = 0.0, *, on_several_hosts: bool = False, **elastic: Any
    ) -> None:
        self.ports = PortsOf()
        self.requests: list[Asks] = []
        self.notes: list[str] = []
        self.retired: list[int] = []
        self.why_not_started = ""
        fields = {"min": 1, "replacements": 0} | elastic
        requests: Any = SimpleNamespace(accept=self.accept, close=lambda: None)
        newcomers = Newcomers(Elastic(**fields), 4, self.start, requests, self.say)
        folders = None if on_several_hosts else handover_folders.HandoverFolders()
        self.members = ElasticMembers(
            fields["min"], self.ports, newcomers, self.retire, folders, head_start
        )
        self.processes: list[Any] = []
        self.all: list[RankStatus] = []
        for rank in range(4):
            self.watch(Process(rank), ready=True)

    def watch(self, process: Any, **state: bool) -> None:
        now = time.monotonic()
        self.processes.append(process)
        self.all.append(RankStatus(process, last_heard=now, last_active=now, **state))  # type: ignore[arg-type]

    def accept(self) -> list[Asks]:
        requests, self.requests = self.requests, []
        return requests

    def say(self, event: Event) -> None:
        assert isinstance(event, LauncherNote)
        self.notes.append(event.text)

    def start(self, rank: int, request: object) -> Any:
        if self.why_not_started:
            raise RunFailedError(self.why_not_started)
        return Process(rank)

    def retire(self, process: Any) -> None:
        self.retired.append(process.info.rank)

    def recruit(self) -> list[int]:
        """Numbers of the processes that are started."""
        started = self.members.recruit(self.all)
        for process in started:
            self.watch(process, joins=True)
        return [process.info.rank for process in started]

    def waits(self, rank: int, state_bytes: int = 8, samples: int = 56) -> None:
        self.note(rank, Waiting(state_bytes=state_bytes, data={"training": [samples, 7]}))

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
    assert membership.ports == (100, 51, 53)
    assert (membership.source, membership.reported) == (1, 4)
    assert membership.behind == (0, 3)  # 3 has not done what follows the last step
    assert [process.received for process in run.processes] == [0, 0, None, 0]
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


def test_what_a_lost_process_has_reported_counts_until_the_next_group_is_published(
    run: Run,
) -> None:
    """Afterwards its successor reports it: read late, it would be there twice, or of steps taken again."""
    steps = Steps(first=0, losses=[0.5] * 3, learning_rates=[1.0] * 3)
    late = Steps(first=3, losses=[0.5] * 2, learning_rates=[1.0] * 2)
    run.lose(0)
    assert run.note(0, steps)
    for rank in (1, 2, 3):
        run.interrupted(rank, 3)
    assert run.regroup() is not None
    assert not run.note(0, late)
    assert not run.note(0, Scalars(steps=[3], values=[{"a": 1.0}]))
    assert not run.note(0, EpochEnded(metrics={}, epoch=0, done=5, loss=0.5))
    run.lose(2)
    for rank in (1, 3):
        run.interrupted(rank, 5, generation=1)
    assert run.regroup() is not None
    membership = run.processes[1].memberships[-1]
    assert (membership.reported, membership.epochs, membership.scalars) == (3, 0, 0)
    assert run.note(1, late)


def test_a_process_that_has_finished_is_no_member_and_counts_as_there() -> None:
    run = Run(min=3)
    run.all[0].finished = True
    assert run.lose(2)
    for rank in (1, 3):
        run.interrupted(rank, 6)
    change = run.regroup()
    assert change is not None
    assert change.members == (1, 3)
    run.members.close()


@pytest.mark.parametrize("done", [6, 5])
def test_no_group_is_formed_on_several_hosts_once_rank_0_has_finished(done: int) -> None:
    """A member is lost after the last step; nobody is there to send the state through."""
    run = Run(on_several_hosts=True)
    run.note(0, Steps(first=0, losses=[0.5] * 6, learning_rates=[1.0] * 6))
    run.all[0].finished = True
    assert run.lose(2)
    run.interrupted(1, 6)
    assert run.regroup() is None
    run.interrupted(3, done)
    if done < 6:
        with pytest.raises(RunFailedError, match=r"(?s)rank 2 .*rank 0, .*after step 6.*step 5"):
            run.regroup()
        return
    change = run.regroup()
    assert change is not None
    assert (list(change.lost), change.done, list(change.members)) == (["2"], 6, [0, 1, 3])
    assert [process.memberships for process in run.processes] == [[]] * 4
    assert not any(each.is_awaited for each in run.all)
    assert run.regroup() is None
    run.members.close()


def test_a_silent_process_is_ended(run: Run) -> None:
    run.all[1].lost = "fell silent"
    assert run.members.lose([run.all[1]], run.all)
    assert run.processes[1].is_gone
    assert run.all[1].left


def test_too_few_or_an_error_or_an_early_loss_end_the_run() -> None:
    run = Run(min=4)
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


def test_a_lost_process_is_replaced_by_one_that_joins_before_a_step() -> None:
    run = Run(replacements=2)
    assert run.recruit() == []
    run.lose(1)
    assert run.recruit() == [4]
    assert run.recruit() == []
    for rank in (0, 2, 3):
        run.interrupted(rank, 5)
    change = run.regroup()
    assert change is not None
    assert (change.members, change.joined) == ((0, 2, 3), ())
    run.waits(4)
    assert run.regroup() is None
    assert [process.asked for process in run.processes] == [0] * 5  # the group is forming
    for rank in (0, 2, 3):
        run.note(rank, Ready(samples=8))
    assert run.regroup() is None
    assert run.regroup() is None
    assert [process.asked for process in run.processes] == [1, 0, 1, 1, 0]
    run.interrupted(2, 7, generation=1)
    assert run.regroup() is None
    assert [process.void for process in run.processes] == [[0, 1], [], [0, 1], [0, 1], []]
    for rank in (0, 3):
        run.interrupted(rank, 7, generation=1)
    change = run.regroup()
    assert change is not None
    assert (change.members, change.joined, change.lost) == ((0, 2, 3, 4), (4,), {})
    (membership,) = run.processes[4].memberships
    assert (membership.generation, membership.source, membership.done) == (2, 0, 7)
    assert membership.ports == (101, 52, 53, 54)
    assert run.ports.released == [100]
    assert not run.all[4].joins
    assert run.notes == []
    run.lose(4)  # before it has taken the state
    for rank in (0, 2, 3):
        run.interrupted(rank, 7, generation=2)
    assert run.regroup() is not None
    assert run.recruit() == [5]
    (note,) = run.notes
    assert note.startswith("2 processes were started in place of lost ones, which is the limit")
    assert run.lose(0)
    assert run.recruit() == []


@pytest.mark.parametrize("least", [1, 4])
def test_the_others_take_a_step_before_a_process_starts(least: int) -> None:
    """Unless they cannot: it would take their cores."""
    run = Run(head_start=1000.0, min=least, replacements=2)
    run.lose(1)
    assert run.recruit() == ([4] if least == 4 else [])
    if least == 4:
        return
    run.note(0, Steps(first=0, losses=[0.5] * 5, learning_rates=[1.0] * 5))  # sent before the loss
    for rank in (0, 2, 3):
        run.interrupted(rank, 5)
    assert run.regroup() is not None
    for rank in (0, 2, 3):
        assert run.recruit() == []
        run.note(rank, Ready(samples=56))
    assert run.recruit() == []
    run.note(0, Steps(first=5, losses=[0.5], learning_rates=[1.0]))
    assert run.recruit() == [4]


def test_a_newcomer_joins_with_the_loss_of_another_and_is_no_source() -> None:
    run = Run(replacements=2)
    run.lose(1)
    run.recruit()
    run.waits(4)
    for rank in (0, 2, 3):
        run.interrupted(rank, 5)
    change = run.regroup()
    assert change is not None
    assert (change.members, change.joined, list(change.lost)) == ((0, 2, 3, 4), (4,), ["1"])
    run.interrupted(4, -1, generation=1)
    for rank in (0, 2, 3):
        run.interrupted(rank, 5, generation=1)
    assert run.regroup() is not None
    assert run.processes[4].memberships[-1].source == 0


def test_nobody_goes_on_once_all_that_have_the_state_are_lost() -> None:
    run = Run(replacements=4)
    run.lose(1)
    run.recruit()
    run.waits(4)
    for rank in (0, 2, 3):
        run.interrupted(rank, 5)
    run.regroup()
    assert not run.lose(0, 2, 3)
    run = Run(replacements=4)
    run.lose(1)
    run.recruit()
    run.waits(4)
    assert not run.lose(0, 2, 3)


def test_members_wait_for_as_many_as_are_needed() -> None:
    run = Run(min=4, replacements=2)
    assert run.lose(1)
    assert run.recruit() == [4]
    for rank in (0, 2, 3):
        run.interrupted(rank, 5)
    assert run.regroup() is None
    run.processes[4].exit_code = 1
    assert run.members.lose([run.all[4]], run.all)
    assert run.regroup() is None
    assert run.recruit() == [5]
    run.waits(5)
    change = run.regroup()
    assert change is not None
    assert (change.members, change.joined) == ((0, 2, 3, 5), (5,))
    for rank in (0, 2, 3, 5):
        run.note(rank, Ready(samples=8))
        run.all[rank].ready = True
    assert not run.lose(0)


def test_too_few_that_come_fail_and_name_the_rank() -> None:
    run = Run(min=4, replacements=1)
    assert run.lose(1)
    assert run.recruit() == [4]
    for rank in (0, 2, 3):
        run.interrupted(rank, 5)
    run.all[4].lost = "did not come up"
    assert run.members.lose([run.all[4]], run.all)
    assert run.processes[4].is_gone
    assert run.notes[-1].startswith("rank 4, which was to join the run, did not come up")
    with pytest.raises(
        RunFailedError, match=r"(?s)^rank 1 of 5 was ended by SIGKILL.*came in its place"
    ):
        run.regroup()


def test_a_process_that_cannot_be_started_is_no_fault_of_the_run() -> None:
    run = Run(replacements=3)
    run.why_not_started = "no memory"
    run.lose(1)
    assert run.recruit() == []
    assert run.recruit() == []
    assert run.notes == ["no process can be started in place of a lost one: no memory"]


def test_the_limit_of_one_process_is_told() -> None:
    run = Run(replacements=1)
    run.lose(1)
    run.recruit()
    assert run.notes[0].startswith("1 process was started in place of lost ones")


def test_replicas_join_on_request_up_to_the_largest_number() -> None:
    run = Run(max=5)
    first, second = Asks(), Asks()
    run.requests = [first, second]
    assert run.recruit() == [4]
    assert first.answers == [{"starts": 4}]
    (refused,) = second.answers
    assert refused["refused"].startswith("it has 5 replicas, and may have 5 (elastic.max")
    assert second.is_closed
    run.waits(4)
    run.regroup()
    for rank in range(4):
        run.interrupted(rank, 3)
    change = run.regroup()
    assert change is not None
    assert change.members == (0, 1, 2, 3, 4)
    assert not first.is_closed  # the group may still fail
    run.note(4, Ready(samples=56))
    assert first.answers[1:] == [{"joined": 4, "done": 3, "replicas": 5}]
    assert first.is_closed
    run.all[0].finished = True
    late = Asks()
    run.requests = [late]
    run.all[4].left = True
    assert run.recruit() == []
    assert late.answers == [{"refused": "the run is about to end"}]


def test_a_newcomer_that_fails_says_so_to_who_asked() -> None:
    run = Run(max=5)
    asked = Asks()
    run.requests = [asked]
    run.recruit()
    run.all[4].update(
        Failed(
            error="ValueError", message="ValueError: no model", traceback="", is_peer_error=False
        )
    )
    assert run.members.lose([run.all[4]], run.all)
    assert run.regroup() is None
    assert asked.answers[1]["failed"].startswith(
        "rank 4, which was to join the run, raised ValueError: ValueError: no model"
    )
    assert asked.is_closed


def test_a_newcomer_with_other_data_is_not_let_in() -> None:
    run = Run(max=6)
    run.requests = asks = [Asks(), Asks()]
    run.note(0, Ready(samples=56, data={"training": [56, 7]}))
    run.recruit()
    run.waits(4, samples=60)
    run.waits(5)
    (_, failed), (_,) = (each.answers for each in asks)
    told = "rank 4, which was to join the run, has 60 training samples where the run has 56 (every process"
    assert failed["failed"].startswith(told)
    assert run.notes[0].startswith(told)
    assert run.processes[4].is_gone
    run.regroup()
    for rank in range(4):
        run.interrupted(rank, 3)
    change = run.regroup()
    assert change is not None
    assert change.joined == (5,)


def test_a_newcomer_that_is_lost_while_the_group_forms_has_not_joined() -> None:
    run = Run(max=5)
    run.requests = [asked] = [Asks()]
    run.recruit()
    run.waits(4)
    run.regroup()
    for rank in range(4):
        run.interrupted(rank, 3)
    run.regroup()
    assert run.lose(4)
    _, failed = asked.answers
    assert failed["failed"].startswith("rank 4, which was to join the run, was ended by SIGKILL")
    assert asked.is_closed


def test_what_a_newcomer_has_sent_before_it_was_lost_does_not_let_it_in() -> None:
    run = Run(max=5)
    run.requests = [Asks()]
    run.recruit()
    run.lose(4)
    run.waits(4)
    assert run.regroup() is None
    assert [process.asked for process in run.processes] == [0] * 5
    run.lose(3)
    for rank in range(3):
        run.interrupted(rank, 3)
    change = run.regroup()
    assert change is not None
    assert change.members == (0, 1, 2)


def test_members_go_on_without_a_newcomer_for_which_the_state_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was asked for when there was room."""
    run = Run(max=5)
    run.requests = [asked] = [Asks()]
    run.recruit()
    run.waits(4)
    run.regroup()
    monkeypatch.setattr(handover_folders, "free_bytes", lambda parent: 4 * (1 << 16) + 100)
    for rank in range(4):
        run.interrupted(rank, 3)
    change = run.regroup()
    assert change is not None
    assert (change.members, change.joined) == ((0, 1, 2, 3), ())
    assert "cannot be let in: elastic: the state takes" in asked.answers[1]["failed"]
    assert run.processes[4].is_gone


def test_a_newcomer_whose_state_fits_nowhere_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_folders, "free_bytes", lambda parent: 1 << 20)
    run = Run(max=5)
    run.requests = [Asks()]
    run.recruit()
    run.waits(4, state_bytes=1 << 20)
    assert run.regroup() is None
    assert [process.asked for process in run.processes] == [0] * 5
    assert "cannot be let in: elastic: the state takes" in run.notes[0]
    assert run.processes[4].is_gone


def test_what_a_lost_process_holds_is_freed(run: Run) -> None:
    run.lose(2)
    run.members.retire(run.all[2])
    assert run.retired == [2]


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_state_for_which_others_leave_no_room_goes_to_the_next_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    """All tasks of a host see the same room, and write into it at the same time."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(handover_folders, "SHARED_MEMORY", memory)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(disk))
    folders = handover_folders.HandoverFolders()

    def write(full: Path, folder: str) -> None:
        (Path(folder) / "part").touch()
        if Path(folder).is_relative_to(full):
            raise CheckpointError("cannot be written") from OSError(number, "why")

    if number == errno.EIO:
        with pytest.raises(CheckpointError, match="cannot be written"):
            folders.fill(8, 1, functools.partial(write, memory))
    else:
        taken = Path(folders.fill(8, 1, functools.partial(write, memory)))
        assert (taken.parent, [each.name for each in taken.iterdir()]) == (disk, ["part"])
        assert not [*memory.iterdir()]
        with pytest.raises(RunFailedError, match=r"disk has .* free, but was full before all was"):
            folders.fill(8, 1, functools.partial(write, tmp_path))
        assert [*disk.iterdir()] == [taken]
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
