"""Members of an elastic run: which processes go on when others are lost or join, and from which state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from isotrain.core.contracts.events import (
    EpochEnded,
    Interrupted,
    MembersChanged,
    ProcessEvent,
    Ready,
    Scalars,
    Steps,
    Waiting,
)
from isotrain.core.contracts.membership import Membership
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.launching.supervision.failure_diagnosis import (
    RankStatus,
    run_failure,
    suspicion,
    verdict,
)
from isotrain.core.launching.supervision.handover_folders import HandoverFolders
from isotrain.core.launching.supervision.monitored_process import MemberProcess
from isotrain.core.launching.supervision.newcomers import Newcomers

_MOST_ATTEMPTS = 3
_HEAD_START_SECONDS = 3.0
"""Time for which no process is started after a loss, unless the others have taken a step before.

A process that starts takes cores that the others need to go on.
"""


class ElasticMembers:
    """The processes that are there, and the process group that they form.

    Once a member is lost, its group is void. Each other member leaves it, and reports how many steps its
    state has. When all have reported, the next group is published, with the state that has come furthest.
    Where a newcomer waits, the members are asked to leave their group before their next step.
    """

    def __init__(
        self,
        least: int,
        ports: Ports,
        newcomers: Newcomers,
        retire: Callable[[Any], None],
        folders: HandoverFolders | None,
        head_start: float = _HEAD_START_SECONDS,
    ) -> None:
        """Begins with the group of all processes.

        Args:
            least: Smallest number of members.
            ports: Ports of this machine, one of which each group meets at.
            newcomers: Starts further processes.
            retire: Frees what an ended process (a `MemberProcess`) holds.
            folders: Folders by which the state is handed over; None: the members send it.
            head_start: Seconds for which no process is started after a loss, while enough are left to go on.
        """
        self._least = least
        self._ports = ports
        self._port: int | None = None
        """Port at which the present group has met; None for the first group."""
        self._newcomers = newcomers
        self._retire = retire
        self._generation = 0
        self._has_begun = False
        """Whether all processes of the start have been ready."""
        self._forming: set[int] = set()
        """Members that have not yet formed the present group."""
        self._is_asked = False
        """Whether the members were asked to leave the present group."""
        self._is_void = False
        self._lost: dict[str, str] = {}
        """What happened to the processes that were lost since the last group was published."""
        self._interrupted: dict[int, Interrupted] = {}
        """Reports of the members that have left the present group."""
        self._steps_at_start = -1
        self._attempts = 0
        """Number of groups in a row that failed at once although nobody was lost."""
        self._steps = 0
        self._scalars = 0
        self._epochs: list[EpochEnded] = []
        self._folders = folders
        self._head_start = head_start
        self._starts_after = 0.0
        """Time from which processes may be started, if enough are left to go on."""

    def close(self) -> None:
        """Removes the state that was handed over, and takes no newcomers any more."""
        self._newcomers.close()
        if self._folders is not None:
            self._folders.close()

    def note(self, rank: int, event: ProcessEvent, all_processes: Sequence[RankStatus]) -> bool:
        """Takes note of an event of a process; returns whether it is new to the run's listeners.

        What a lost rank 0 has reported, and is read after the next group was published, is not: the
        new rank 0 reports it.
        """
        is_published_without = all_processes[rank].left and str(rank) not in self._lost
        if is_published_without and isinstance(event, Steps | Scalars | EpochEnded):
            return False
        if isinstance(event, Interrupted):
            if event.generation == self._generation:
                self._interrupted[rank] = event
        elif isinstance(event, Waiting):
            self._newcomers.note(all_processes[rank], event)
        elif isinstance(event, Ready):
            self._forming.discard(rank)
            self._newcomers.note_ready(rank, event)
        elif isinstance(event, Steps):
            self._steps = max(self._steps, event.first + len(event.losses))
            if not self._is_void and not self._forming:
                self._starts_after = 0.0
            for each in all_processes:
                if not each.left:
                    _process(each).acknowledge(event.first)
        elif isinstance(event, Scalars):
            self._scalars = max(self._scalars, max(event.steps) + 1)
        elif isinstance(event, EpochEnded):
            if any(event.epoch == each.epoch for each in self._epochs):
                return False
            self._epochs.append(event)
        return True

    def lose(self, lost: Sequence[RankStatus], all_processes: Sequence[RankStatus]) -> bool:
        """Lets the run go on without processes that have ended or fallen silent, if enough are left or start.

        Returns:
            Whether it goes on. It does not after an error that a member has raised, where one is lost before
            all have begun to train, or where no member is left that has the state.
        """
        for each in lost:
            if each.joins:
                self._newcomers.drop(each)
        lost = [each for each in lost if not each.left]
        if not lost:
            return True
        members = [each for each in all_processes if not each.left and not each.joins]
        left = [each for each in members if each not in lost]
        self._has_begun = self._has_begun or all(each.ready for each in members)
        count = len(left) + self._newcomers.hope(all_processes)
        if any(each.failure for each in lost) or not self._has_begun or count < self._least:
            return False
        if not any(each.ready for each in left):
            return False
        for each in lost:
            self._lost[str(each.rank)] = verdict(each)
            self._newcomers.lose(each)
            each.process.end()  # also what it has started
            each.left = True
            self._interrupted.pop(each.rank, None)
        self._make_void(left)
        self._starts_after = time.monotonic() + self._head_start
        return True

    def recruit(self, all_processes: Sequence[RankStatus]) -> list[MemberProcess]:
        """Starts the processes that are to join the run; returns them."""
        members = [each for each in all_processes if not each.left and not each.joins]
        self._has_begun = self._has_begun or all(each.ready for each in members)
        go_on_first = len(members) >= self._least and time.monotonic() < self._starts_after
        if not self._has_begun or go_on_first:
            return []
        return self._newcomers.recruit(all_processes)

    def retire(self, lost: RankStatus) -> None:
        """Frees what a lost process holds, once it has ended and all that it has sent is read."""
        self._retire(_process(lost))

    def _make_void(self, members: Sequence[RankStatus]) -> None:
        if not self._is_void:
            self._is_void = True
            for each in members:
                _process(each).void_group(self._generation)

    def regroup(self, all_processes: Sequence[RankStatus]) -> MembersChanged | None:
        """Publishes the next process group once all that are left wait for it; returns its event.

        A process that has finished is no member of it. Where the members send their state through rank 0 and
        it has finished, no group is formed: the run ends with what rank 0 has done.

        Raises:
            RunFailedError: Their state fits nowhere, newcomers that are needed have failed, or rank 0 has
                finished before the others have taken all steps.
        """
        present = [each for each in all_processes if not each.left and not each.joins]
        members = [each for each in present if not each.finished]
        if not self._interrupted:
            if len(members) == len(present):  # not at the end of the run
                self._ask_to_regroup(members, all_processes)
            return None
        self._make_void(members)
        if any(each.rank not in self._interrupted for each in members):
            return None
        if self._folders is None and members and all_processes[0].finished:
            return self._end_with_rank_zero(members, all_processes)
        joining = [each for each, _ in self._newcomers.waiting(all_processes)]
        if len(present) + len(joining) < self._least:
            if len(present) + self._newcomers.hope(all_processes) < self._least:
                raise self._failure(all_processes, "no process came in its place")
            return None
        reports = {each.rank: self._interrupted[each.rank] for each in members}
        source, furthest = max(
            reports.items(), key=lambda item: (item[1].done, item[1].phase, -item[0])
        )
        if furthest.done < 0:
            raise self._failure(
                all_processes,
                "the others cannot go on: the replicas' weights differed in the checkpoint from which they"
                " resumed, and were not averaged since. --max-restarts restarts from a checkpoint",
            )
        has_cause = bool(self._lost) or self._is_asked or furthest.done > self._steps_at_start
        self._attempts = 0 if has_cause else self._attempts + 1
        if self._attempts > _MOST_ATTEMPTS:
            return None  # nobody is lost, and it failed at once: a timeout ends the run
        size = furthest.state_bytes + sum(each.metrics_bytes for each in reports.values())
        folder = None
        try:
            if self._folders is not None:
                folder = self._folders.take(size, writers=len(members) + len(joining))
        except RunFailedError as error:
            if not joining or len(present) < self._least:
                raise self._failure(all_processes, str(error)) from None
            for each in joining:
                self._newcomers.drop(each, f"cannot be let in: {error}")
            return self.regroup(all_processes)
        self._generation += 1
        self._is_void = self._is_asked = False
        self._steps_at_start = furthest.done
        self._rewind_to(furthest.done)
        members += joining
        self._forming = {each.rank for each in members}
        membership = Membership(
            generation=self._generation,
            members=tuple(each.rank for each in members),
            ports=self._ports_of(members),
            source=source,
            behind=tuple(
                each.rank
                for each in members
                if each.rank != source and _is_behind(reports.get(each.rank), furthest)
            ),
            done=furthest.done,
            metrics_collected=furthest.metrics_collected,
            reported=self._steps,
            epochs=max((each.epoch + 1 for each in self._epochs), default=0),
            scalars=self._scalars,
            folder=folder,
            joined=tuple(
                (each.rank, each.process.info.host, _process(each).address[0])
                for each in members
                if each.rank >= self._newcomers.first_rank
            ),
        )
        lost, self._lost = self._lost, {}
        self._interrupted = {}
        for each in members:
            _process(each).publish_membership(membership)
        self._newcomers.let_in(members, furthest.done)
        return MembersChanged(
            time=time.time(),
            generation=self._generation,
            lost=lost,
            joined=tuple(each.rank for each in joining),
            done=furthest.done,
            members=membership.members,
        )

    def _end_with_rank_zero(
        self, members: Sequence[RankStatus], all_processes: Sequence[RankStatus]
    ) -> MembersChanged:
        """Waits no more for members that have taken all steps, as rank 0 has, which has finished.

        Raises:
            RunFailedError: They have not, and get the state from nobody.
        """
        done = min(self._interrupted[each.rank].done for each in members)
        if done < self._steps:
            raise self._failure(
                all_processes,
                f"rank 0, through which the state is sent, has finished after step {self._steps}, and"
                f" others only have the state after step {done}",
            )
        present = [each.rank for each in all_processes if not each.left and not each.joins]
        for each in members:
            each.left = True
        self._interrupted = {}
        lost, self._lost = self._lost, {}
        return MembersChanged(
            time=time.time(),
            generation=self._generation,
            lost=lost,
            done=done,
            members=present,
        )

    def _failure(self, all_processes: Sequence[RankStatus], reason: str) -> RunFailedError:
        """The error that the run cannot go on, which names the process that was lost."""
        lost = [each for each in all_processes if str(each.rank) in self._lost]
        if not lost:
            return RunFailedError(reason)
        failure = run_failure(min(lost, key=suspicion), all_processes)
        failure.args = (f"{failure}\n{reason}",)
        return failure

    def _ask_to_regroup(
        self, members: Sequence[RankStatus], all_processes: Sequence[RankStatus]
    ) -> None:
        """Asks the members to leave their group before their next step, if a newcomer waits.

        Not while a group forms. A newcomer whose state fits nowhere is not let in.
        """
        is_training = self._has_begun and not self._forming and not self._is_void
        waiting = self._newcomers.waiting(all_processes)
        if self._is_asked or not waiting or not is_training:
            return
        folders, writers = self._folders, len(members) + len(waiting)
        for each, event in waiting:
            fault = folders and folders.shortage(event.state_bytes, writers=writers)
            if fault:
                self._newcomers.drop(each, f"cannot be let in: {fault}")
        if any(not each.left for each, _ in waiting):
            self._is_asked = True
            for each in members:
                _process(each).request_regroup()

    def _ports_of(self, members: Sequence[RankStatus]) -> tuple[int, ...]:
        """A new port for the group to meet at, and those of the members but the first."""
        if self._port is not None:
            self._ports.release(self._port)
        (self._port,) = self._ports.take(1)
        return self._port, *(_process(each).address[1] for each in members[1:])

    def _rewind_to(self, done: int) -> None:
        """Forgets what was reported of steps that are taken again."""
        self._steps, self._scalars = min(self._steps, done), min(self._scalars, done)
        self._epochs = [each for each in self._epochs if each.done <= done]


def _process(watched: RankStatus) -> MemberProcess:
    return watched.process  # type: ignore[return-value]


def _is_behind(report: Interrupted | None, furthest: Interrupted) -> bool:
    """Whether a member's state is older than the one that has come furthest or differs, or it has none."""
    if report is None or report.replicas_differ:
        return True
    return (report.done, report.phase) < (furthest.done, furthest.phase)
