"""Newcomers of an elastic run: processes that are started while it trains, until they are members."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from isotrain.core.contracts.events import LauncherNote, OnEvent, Waiting
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus, verdict
from isotrain.core.launching.supervision.join_requests import JoinRequest, JoinRequests
from isotrain.core.quantities import counted
from isotrain.core.spec.sections import Elastic

if TYPE_CHECKING:
    from isotrain.core.launching.processes.rank_process import RankProcess


class Newcomers:
    """Starts processes in place of lost ones, and those that `isotrain join` requests.

    A newcomer gets the next number after the ranks of the start. It builds its model, and waits to be let in.
    """

    def __init__(
        self,
        elastic: Elastic,
        replicas: int,
        start: Callable[[int], RankProcess],
        requests: JoinRequests,
        on_event: OnEvent,
    ) -> None:
        """Starts nothing yet.

        Args:
            elastic: The spec's section.
            replicas: Number of replicas at the start, up to which lost ones are replaced.
            start: Starts a process with a number.
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

    def close(self) -> None:
        """Closes the requests."""
        self._requests.close()
        for client in self._clients.values():
            client.close()

    def note(self, rank: int, event: Waiting) -> None:
        """Takes note that a newcomer waits to be let in."""
        self._waiting[rank] = event

    def waiting(self, processes: Iterable[RankStatus]) -> list[tuple[RankStatus, Waiting]]:
        """The newcomers that wait to be let in, by number."""
        return [
            (each, self._waiting[each.rank]) for each in processes if each.rank in self._waiting
        ]

    def hope(self, processes: Sequence[RankStatus]) -> int:
        """Number of processes that may still join without a request."""
        left_over = 0 if _is_ending(processes) else self._left_over
        return left_over + sum(each.joins and not each.left for each in processes)

    def recruit(self, processes: Sequence[RankStatus]) -> list[RankProcess]:
        """Starts processes in place of lost ones, and those that are requested; returns them.

        Args:
            processes: All processes that the run has started.
        """
        is_ending = _is_ending(processes)
        count = sum(not each.left for each in processes)
        started: list[RankProcess] = []
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
                self._say(
                    f"{counted(self._allowed, 'process')} were started in place of lost ones, which"
                    " is the limit (elastic.replacements): those that are lost now are not replaced"
                )
        for request in self._requests.accept():
            process = self._refusal(count, is_ending) or self._started(
                len(processes) + len(started)
            )
            if isinstance(process, str):
                request.answer({"refused": process})
                request.close()
                continue
            started.append(process)
            count += 1
            self._clients[process.context.rank] = request
            request.answer({"starts": process.context.rank})
        return started

    def _refusal(self, count: int, is_ending: bool) -> str | None:
        """Reason why no further replica may join; None: it may."""
        if is_ending:
            return "the run is about to end"
        if count >= self._most:
            return f"it has {counted(count, 'replica')}, and may have {self._most} (elastic.max of its spec)"
        return None

    def _started(self, rank: int) -> RankProcess | str:
        """A new process, or the reason why it cannot be started."""
        try:
            return self._start(rank)
        except RunFailedError as error:
            return str(error)

    def let_in(self, newcomers: Sequence[RankStatus], done: int, replicas: int) -> None:
        """Takes note that newcomers are members of a process group.

        Args:
            newcomers: The newcomers.
            done: Number of steps done.
            replicas: Number of replicas in the group.
        """
        for each in newcomers:
            each.joins = False
            del self._waiting[each.rank]
            if (client := self._clients.pop(each.rank, None)) is not None:
                client.answer({"joined": each.rank, "done": done, "replicas": replicas})
                client.close()

    def drop(self, newcomer: RankStatus, reason: str | None = None) -> None:
        """Goes on without a newcomer that has failed, or that is not let in for a reason."""
        why = reason or verdict(newcomer)
        newcomer.process.end()
        newcomer.left = True
        self._waiting.pop(newcomer.rank, None)
        if newcomer.failure is not None:
            why += f": {newcomer.failure.message.strip().splitlines()[0]}"
        text = f"rank {newcomer.rank}, which was to join the run, {why}"
        if (client := self._clients.pop(newcomer.rank, None)) is not None:
            client.answer({"failed": f"{text}. Its log: {newcomer.process.log}"})
            client.close()
        self._say(f"{text}: the run goes on without it")

    def _say(self, text: str) -> None:
        self._on_event(LauncherNote(time=time.time(), text=text))


def _is_ending(processes: Sequence[RankStatus]) -> bool:
    """Whether a process has finished its work: nobody joins any more."""
    return any(each.finished for each in processes)
