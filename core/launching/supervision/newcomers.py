"""Newcomers of an elastic run: processes that come while it trains, until they are members."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from isotrain.core.contracts.events import LauncherNote, OnEvent, Ready, Waiting
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus, verdict
from isotrain.core.launching.supervision.monitored_process import MemberProcess
from isotrain.core.quantities import counted
from isotrain.core.spec.sections import Elastic

if TYPE_CHECKING:
    from isotrain.core.data.identity import DataIdentity


class JoinRequest(Protocol):
    """A request for a further replica."""

    def answer(self, fields: Mapping[str, Any]) -> None:
        """Sends an answer; does nothing if nobody reads it."""

    def close(self) -> None:
        """Ends the answers."""


class JoinRequests(Protocol):
    """The requests that a run receives."""

    def accept(self) -> Sequence[JoinRequest]:
        """The requests since the last call, without waiting."""

    def close(self) -> None:
        """Stops listening."""


class Newcomers:
    """Starts processes in place of lost ones, and takes those that `isotrain join` requests.

    A newcomer gets the next number after the ranks of the start. It builds its model, and waits to be let in.
    """

    def __init__(
        self,
        elastic: Elastic,
        replicas: int,
        start: Callable[[int, Any], MemberProcess],
        requests: JoinRequests,
        on_event: OnEvent,
    ) -> None:
        """Starts nothing yet.

        Args:
            elastic: The spec's section.
            replicas: Number of replicas at the start, up to which lost ones are replaced.
            start: Starts a process with a number; for a request (of `requests`) or for none.
            requests: Requests for further replicas.
            on_event: Receives notes on newcomers that fail.
        """
        self._replicas = replicas
        self._most = replicas if elastic.max is None else elastic.max
        self._allowed = self._left_over = elastic.replacements
        self._start = start
        self._requests = requests
        self._on_event = on_event
        self._waiting: dict[int, Waiting] = {}
        self._clients: dict[int, JoinRequest] = {}
        self._answers: dict[int, Mapping[str, int]] = {}
        """Answers to the clients whose newcomers are in a process group that forms."""
        self._data: DataIdentity | None = None

    def close(self) -> None:
        """Closes the requests."""
        self._requests.close()
        for client in self._clients.values():
            client.close()

    def note(self, newcomer: RankStatus, event: Waiting) -> None:
        """Takes note that a newcomer waits to be let in; goes on without it if it has other data."""
        from isotrain.core.data.identity import data_difference  # imports NumPy

        if newcomer.left:
            return
        self._waiting[newcomer.rank] = event
        difference = data_difference(event.data, self._data or {}, "the run")
        if difference is not None:
            same = "every process must load the same samples in the same order"
            self.drop(newcomer, f"has {difference} ({same})")

    def note_ready(self, rank: int, event: Ready) -> None:
        """Takes note of the run's data, and that a newcomer has formed a process group with the others."""
        self._data = self._data or event.data
        if (answer := self._answers.pop(rank, None)) is not None:
            self._finish(rank, answer)

    @property
    def first_rank(self) -> int:
        """Rank of the first newcomer: those of the start have the ranks below."""
        return self._replicas

    def _finish(self, rank: int, answer: Mapping[str, Any]) -> None:
        """Sends who asked for a newcomer the last answer, if anybody did."""
        if (client := self._clients.pop(rank, None)) is not None:
            client.answer(answer)
            client.close()

    def waiting(self, processes: Iterable[RankStatus]) -> list[tuple[RankStatus, Waiting]]:
        """The newcomers that wait to be let in, by number."""
        present = [each for each in processes if each.joins and not each.left]
        return [(each, self._waiting[each.rank]) for each in present if each.rank in self._waiting]

    def hope(self, processes: Sequence[RankStatus]) -> int:
        """Number of processes that may still join without a request."""
        left_over = 0 if _is_ending(processes) else self._left_over
        return left_over + sum(each.joins and not each.left for each in processes)

    def recruit(self, processes: Sequence[RankStatus]) -> list[MemberProcess]:
        """Starts processes in place of lost ones, and those that are requested; returns them.

        Args:
            processes: All processes that the run has started.
        """
        is_ending = _is_ending(processes)
        count = sum(not each.left for each in processes)
        started: list[MemberProcess] = []
        while count < self._replicas and self._left_over and not is_ending:
            self._left_over -= 1
            process = self._started(len(processes) + len(started))
            if isinstance(process, str):
                self._left_over = 0
                self._say(f"no process can be started in place of a lost one: {process}")
                break
            started.append(process)
            count += 1
            if not self._left_over:
                was = "was" if self._allowed == 1 else "were"
                self._say(
                    f"{counted(self._allowed, 'process')} {was} started in place of lost ones, which"
                    " is the limit (elastic.replacements): those that are lost now are not replaced"
                )
        for request in self._requests.accept():
            process = self._refusal(count, is_ending) or self._started(
                len(processes) + len(started), request
            )
            if isinstance(process, str):
                request.answer({"refused": process})
                request.close()
                continue
            started.append(process)
            count += 1
            self._clients[process.info.rank] = request
            request.answer({"starts": process.info.rank})
        return started

    def _refusal(self, count: int, is_ending: bool) -> str | None:
        """Reason why no further replica may join; None: it may."""
        if is_ending:
            return "the run is about to end"
        if count >= self._most:
            return f"it has {counted(count, 'replica')}, and may have {self._most} (elastic.max of its spec)"
        return None

    def _started(self, rank: int, request: JoinRequest | None = None) -> MemberProcess | str:
        """A new process, or the reason why it cannot be started."""
        try:
            return self._start(rank, request)
        except RunFailedError as error:
            return str(error)

    def let_in(self, members: Sequence[RankStatus], done: int) -> None:
        """Takes note of the members of a process group that forms, among which may be newcomers.

        Args:
            members: The members.
            done: Number of steps done.
        """
        for each in members:
            each.joins = False
            self._waiting.pop(each.rank, None)
            if each.rank in self._clients:
                self._answers[each.rank] = {
                    "joined": each.rank,
                    "done": done,
                    "replicas": len(members),
                }

    def lose(self, member: RankStatus) -> None:
        """Tells who asked for a newcomer that it is lost, if it has not joined yet."""
        self._answers.pop(member.rank, None)
        text = f"rank {member.rank}, which was to join the run, {verdict(member)}"
        self._finish(member.rank, {"failed": f"{text}. Its log: {member.process.log}"})

    def drop(self, newcomer: RankStatus, reason: str | None = None) -> None:
        """Goes on without a newcomer that has failed, or that is not let in for a reason."""
        why = reason or verdict(newcomer)
        newcomer.lost = newcomer.lost or reason  # an error with which the run ends says it
        newcomer.left = True
        self._waiting.pop(newcomer.rank, None)
        if newcomer.failure is not None:
            why += f": {newcomer.failure.message.strip().splitlines()[0]}"
        text = f"rank {newcomer.rank}, which was to join the run, {why}"
        self._finish(newcomer.rank, {"failed": f"{text}. Its log: {newcomer.process.log}"})
        newcomer.process.end()
        self._say(f"{text}: the run goes on without it")

    def _say(self, text: str) -> None:
        self._on_event(LauncherNote(time=time.time(), text=text))


def _is_ending(processes: Sequence[RankStatus]) -> bool:
    """Whether a process has finished its work: nobody joins any more."""
    return any(each.finished for each in processes)
