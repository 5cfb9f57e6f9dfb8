"""Members of an elastic run: decides which processes go on when others are lost, and from which state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from isotrain.core.contracts.events import (
    EpochEnded,
    Interrupted,
    MembersChanged,
    ProcessEvent,
    Scalars,
    Steps,
)
from isotrain.core.contracts.membership import Membership
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.supervision.failure_diagnosis import (
    RankStatus,
    run_failure,
    suspicion,
    verdict,
)
from isotrain.core.launching.supervision.handover_folders import HandoverFolders

if TYPE_CHECKING:
    from isotrain.core.launching.processes.rank_process import RankProcess

_MOST_ATTEMPTS = 3


class ElasticMembers:
    """The processes that are there, and the process group that they form.

    Once a member is lost, its group is void. Each other member leaves it, and reports how many steps its
    state has. When all have reported, the next group is published, with the state that has come furthest.
    """

    def __init__(self, least: int, take_port: Callable[[], int]) -> None:
        """Begins with the group of all processes.

        Args:
            least: Smallest number of members.
            take_port: Reserves a port for a group to meet at.
        """
        self._least = least
        self._take_port = take_port
        self._generation = 0
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
        self._folders = HandoverFolders()

    def close(self) -> None:
        """Removes the state that was handed over."""
        self._folders.close()

    def note(self, rank: int, event: ProcessEvent, all_processes: Sequence[RankStatus]) -> bool:
        """Takes note of an event of a process; returns whether it is new to the run's listeners."""
        if isinstance(event, Interrupted):
            if event.generation == self._generation:
                self._interrupted[rank] = event
        elif isinstance(event, Steps):
            self._steps = max(self._steps, event.first + len(event.losses))
            for each in all_processes:
                _process(each).acknowledge(event.first)
        elif isinstance(event, Scalars):
            self._scalars = max(self._scalars, max(event.steps) + 1)
        elif isinstance(event, EpochEnded):
            if any(event.epoch == each.epoch for each in self._epochs):
                return False
            self._epochs.append(event)
        return True

    def lose(self, lost: Sequence[RankStatus], all_processes: Sequence[RankStatus]) -> bool:
        """Lets the run go on without processes that have ended or fallen silent, if enough are left.

        Returns:
            Whether it goes on. It does not after an error that a process has raised, or where one is lost
            before all have begun to train.
        """
        left = [each for each in all_processes if not each.left and each not in lost]
        has_begun = all(each.ready for each in all_processes)
        if any(each.failure for each in lost) or not has_begun or len(left) < self._least:
            return False
        for each in lost:
            self._lost[str(each.rank)] = verdict(each)
            if not each.process.is_gone:
                each.process.end()
            each.left = True
            self._interrupted.pop(each.rank, None)
        self._make_void(left)
        return True

    def _make_void(self, members: Sequence[RankStatus]) -> None:
        if not self._is_void:
            self._is_void = True
            for each in members:
                _process(each).void_group(self._generation)

    def regroup(self, all_processes: Sequence[RankStatus]) -> MembersChanged | None:
        """Publishes the next process group once all that are left wait for it; returns its event.

        A process that has finished is no member of it.

        Raises:
            RunFailedError: Their state fits nowhere.
        """
        members = [each for each in all_processes if not each.left and not each.finished]
        if not self._interrupted:
            return None
        self._make_void(members)
        if any(each.rank not in self._interrupted for each in members):
            return None
        reports = {each.rank: self._interrupted[each.rank] for each in members}
        source, furthest = max(
            reports.items(), key=lambda item: (item[1].done, item[1].phase, -item[0])
        )
        has_cause = bool(self._lost) or furthest.done > self._steps_at_start
        self._attempts = 0 if has_cause else self._attempts + 1
        if self._attempts > _MOST_ATTEMPTS:
            return None  # nobody is lost, and it failed at once: a timeout ends the run
        folder = self._folder(furthest, reports, all_processes)
        self._generation += 1
        self._is_void = False
        self._steps_at_start = furthest.done
        self._rewind_to(furthest.done)
        membership = Membership(
            generation=self._generation,
            members=tuple(reports),
            port=self._take_port(),
            source=source,
            done=furthest.done,
            phase=furthest.phase,
            reported=self._steps,
            epochs=max((each.epoch + 1 for each in self._epochs), default=0),
            scalars=self._scalars,
            folder=folder,
        )
        lost, self._lost = self._lost, {}
        self._interrupted = {}
        for each in members:
            _process(each).publish_membership(membership)
        return MembersChanged(
            time=time.time(),
            generation=self._generation,
            lost=lost,
            done=furthest.done,
            members=membership.members,
        )

    def _folder(
        self,
        source: Interrupted,
        reports: Mapping[int, Interrupted],
        all_processes: Sequence[RankStatus],
    ) -> str:
        """Folder for the state of the source and the metrics of all.

        Raises:
            RunFailedError: The state fits nowhere; says which process was lost, too.
        """
        size = source.state_bytes + sum(each.metrics_bytes for each in reports.values())
        try:
            return self._folders.take(size, writers=len(reports))
        except RunFailedError as error:
            lost = [each for each in all_processes if str(each.rank) in self._lost]
            if not lost:
                raise
            failure = run_failure(min(lost, key=suspicion), all_processes)
            failure.args = (f"{failure}\n{error}",)
            raise failure from None

    def _rewind_to(self, done: int) -> None:
        """Forgets what was reported of steps that are taken again."""
        self._steps, self._scalars = min(self._steps, done), min(self._scalars, done)
        self._epochs = [each for each in self._epochs if each.done <= done]


def _process(watched: RankStatus) -> RankProcess:
    """The process on this machine; elastic runs have no others."""
    return watched.process  # type: ignore[return-value]
