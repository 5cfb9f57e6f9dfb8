"""The meeting of a joined run's processes: each tells its facts, rank 0 judges, all get its decision."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from isotrain.core import errors
from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.errors import (
    EndedError,
    IsotrainError,
    PeerLostError,
    PlanError,
    RunFailedError,
)
from isotrain.core.planning.cluster_environment import claim
from isotrain.core.rendezvous.shared_secret import RunKey
from isotrain.core.system.deadline import Deadline
from isotrain.core.transport.channel import Channel, finish
from isotrain.core.transport.rank_zero_server import (
    LONG_WAIT_SECONDS,
    RankZeroServer,
)

Facts = Mapping[str, Any]
"""What a process tells of itself: JSON values."""
DecisionFunction = Callable[[Sequence[Facts]], dict[str, Any]]
"""Makes a decision of all processes' facts, by rank; raises where they do not fit."""

_LOOK_SECONDS = 0.02
LATE_SECONDS = 5.0
"""For so long rank 0 tells those who come late that the run has failed, unless it has waited for them."""
_GONE_SECONDS = 1.0
"""In which it is noticed that a caller has hung up."""
RECONNECT_SECONDS = 2.0
"""In which one who hung up without a word calls again: it had not heard in time that it was let in."""
_FIRST_SECONDS = 8.0
"""So long the others wait for rank 0 to hang up: an engine may end all processes once one of them has failed,
and rank 0 is the one that says why."""
_MARGIN_SECONDS = 10.0
"""How much longer than rank 0 the others wait: it can say who did not come."""


class Rendezvous(ABC):
    """Where the processes of a joined run agree before it begins.

    Every process calls the same methods in the same order.

    Attributes:
        place: Of this process.
        key: Of the run.
        seconds: That each step of it may take.
    """

    def __init__(self, place: ClusterInfo, key: RunKey, seconds: float) -> None:
        self.place = place
        self.key = key
        self.seconds = seconds
        self._has_failed = False

    @abstractmethod
    def agree(self, facts: Facts, judge: DecisionFunction) -> dict[str, Any]:
        """Gives every process the same decision.

        Args:
            facts: Of this process.
            judge: Called on rank 0.

        Raises:
            IsotrainError: On every process the same: what the judge found, or which process failed.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tells the others that this process cannot go on. Rank 0 hangs up when it ends or goes on."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connections, once what was sent has been read."""

    @contextlib.contextmanager
    def broadcasting_errors(self) -> Iterator[None]:
        """Tells the others of any error within."""
        try:
            yield
        except BaseException as error:
            if not self._has_failed:
                self._has_failed = True
                self.fail(error)
            raise


class RendezvousHost(Rendezvous):
    """Rank 0's part.

    Attributes:
        channels: To the others, by rank.
    """

    _left_open: ClassVar[RendezvousHost | None] = None
    """Of this program's run that has failed before."""

    def __init__(
        self, place: ClusterInfo, key: RunKey, seconds: float, welcome: RankZeroServer
    ) -> None:
        super().__init__(place, key, seconds)
        self.channels: dict[int, Channel] = {}
        self._welcome = welcome
        self._late = LATE_SECONDS
        self._has_said_whom_it_awaits = False
        self._names: dict[int, str] = {}
        """Rank to its host, as far as it has told."""
        self._left: dict[int, float] = {}
        """Who was seen to have hung up, and when first."""

    def agree(self, facts: Facts, judge: DecisionFunction) -> dict[str, Any]:
        with self.broadcasting_errors():
            told = self._gathered()
            decision = judge([facts, *(told[rank] for rank in sorted(told))])
        for channel in self.channels.values():
            channel.send({"decision": decision})
        return decision

    def _gathered(self) -> dict[int, Facts]:
        """What each of the others tells in this round.

        Raises:
            IsotrainError: One has failed, did not come or left.
        """
        told: dict[int, Facts] = {}
        began = time.monotonic()
        deadline = began + self.seconds
        while missing := [rank for rank in range(1, self.place.world_size) if rank not in told]:
            self._let_in()
            for rank in missing:
                facts = self._heard(rank)
                if facts is not None:
                    told[rank] = facts
                    self._names[rank] = str(facts.get("host", self._names.get(rank, "")))
            if time.monotonic() > began + LONG_WAIT_SECONDS and not self._has_said_whom_it_awaits:
                self._say_who_is_absent()
            if time.monotonic() > deadline:
                self._late = 0.0
                raise PeerLostError(self._who_did_not_come(missing))
            time.sleep(_LOOK_SECONDS)
        return told

    def _say_who_is_absent(self) -> None:
        """On the terminal, once: of those who have come nobody has to look for."""
        self._has_said_whom_it_awaits = True
        ranks = (rank for rank in range(1, self.place.world_size) if rank not in self.channels)
        if absent := ", ".join(map(str, ranks)):
            at = f"rank {absent} at {self._welcome.location}"
            announce_wait(self.place, at, self.seconds)

    def _let_in(self) -> None:
        refused = None
        for rank, wire in self._welcome.arrivals():
            if 0 < rank < self.place.world_size and not self._is_here(rank):
                self.channels[rank] = Channel(wire)
                self._left.pop(rank, None)
            else:  # those who came at the same time are to hear of it too
                wire.close()
                refused = rank
        for problem in self._welcome.rejected.values():
            raise PlanError(problem)
        if refused is not None:
            raise IsotrainError(
                f"two processes say that they are rank {refused} of the run's {self.place.world_size}."
                f" Look at what the engine, {self.place.environment}, was told to start. {claim(self.place)}"
            )

    def _is_here(self, rank: int) -> bool:
        """Whether a process of this rank has come and has not given up since, waiting to be let in."""
        channel = self.channels.get(rank)
        if channel is None:
            return False
        has_gone = channel.has_gone(_GONE_SECONDS)
        if has_gone:
            channel.close()
        return not has_gone

    def _heard(self, rank: int) -> Facts | None:
        channel = self.channels.get(rank)
        messages = [] if channel is None else channel.read()
        if messages is None:
            now = time.monotonic()
            if (
                rank not in self._names
                and now - self._left.setdefault(rank, now) < RECONNECT_SECONDS
            ):
                return None
            raise PeerLostError(
                f"{self._name(rank)} left before the run began: its connection to rank 0 was closed. Its"
                f" own output, which {self.place.environment} has, says more."
            )
        if channel is None or not messages:
            return None
        (message, _), *others = messages
        channel.put_back(others)
        if "error" in message:
            raise remote_error(message, f"{self._name(rank)}: ")
        facts: Facts = message["facts"]
        return facts

    def _name(self, rank: int) -> str:
        host = self._names.get(rank)
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def _who_did_not_come(self, missing: Sequence[int]) -> str:
        known = [rank for rank in missing if rank in self.channels]
        silent = ", ".join(map(self._name, known))
        absent = ", ".join(str(rank) for rank in missing if rank not in known)
        if known:
            return f"{silent} said nothing for {self.seconds:g} s before the run began."
        return (
            f"rank {absent} of {self.place.world_size} never came to {self._welcome.location}, in"
            f" {self.seconds:g} s (timeouts.start). Was it started, can its host reach this one there, and"
            f" has it the same key? {self._welcome.rejected_clients} clients were rejected."
            f" {claim(self.place)}"
        )

    def reachable_address(self, told: Sequence[Facts]) -> str:
        """The own address by which the others have called, those on other hosts above all."""
        others = [rank for rank in self.channels if told[rank]["host"] != told[0]["host"]]
        return self.channels[min(others)].local_address if others else LOCALHOST

    def fail(self, error: BaseException) -> None:
        message = as_message(error)
        self._close_later()
        patience = Deadline(self._late)
        informed: set[int] = set()
        while True:
            with contextlib.suppress(IsotrainError):
                self._let_in()
            for rank in self.channels.keys() - informed:
                self.channels[rank].send(message)
                informed.add(rank)
            know = informed | self._welcome.rejected.keys()
            if len(know) == self.place.world_size - 1 or patience.is_over:
                break
            time.sleep(_LOOK_SECONDS)
        self.close_server()

    def broadcast_failure(self, error: BaseException) -> None:
        """Tells the others how a run that had begun has failed."""
        self._has_failed = True
        self._close_later()
        told: BaseException = error
        if not isinstance(error, RunFailedError):
            words = f"{type(error).__name__}: {error}".strip(": ")
            told = EndedError(f"the run was ended on rank 0: {words}")
        elif error.was_asked:
            told = EndedError(str(error))
        for channel in self.channels.values():
            channel.send(as_message(told))

    def _close_later(self) -> None:
        """Hangs up when this program ends, or joins another run."""
        atexit.register(self.close)
        RendezvousHost._left_open = self

    @classmethod
    def close_previous(cls) -> None:
        """Hangs up on those whose run has failed: they wait for that to end, or to go on."""
        if cls._left_open is not None:
            cls._left_open.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        if RendezvousHost._left_open is self:
            RendezvousHost._left_open = None
        self.close_server()
        finish(self.channels.values())

    def close_server(self) -> None:
        """Lets nobody in any more."""
        self._welcome.close()


class RendezvousClient(Rendezvous):
    """The part of any other process.

    Attributes:
        channel: To rank 0.
    """

    def __init__(self, place: ClusterInfo, key: RunKey, seconds: float, channel: Channel) -> None:
        super().__init__(place, key, seconds)
        self.channel = channel

    def agree(self, facts: Facts, judge: DecisionFunction) -> dict[str, Any]:
        self.channel.send({"facts": dict(facts)})
        message = self.channel.wait(self.seconds + _MARGIN_SECONDS)
        if message is None:
            raise PeerLostError("rank 0 is gone, or says nothing, before the run began.")
        header, _ = message
        if "error" in header:
            raise remote_error(header)
        decision: dict[str, Any] = header["decision"]
        return decision

    def fail(self, error: BaseException) -> None:
        self.channel.send(as_message(error))
        self.close()

    def close(self) -> None:
        self.channel.await_end(_FIRST_SECONDS)
        finish([self.channel])


def as_message(error: BaseException) -> dict[str, str]:
    """An error as JSON values."""
    kind = type(error).__name__
    if isinstance(error, IsotrainError):
        return {"error": kind, "text": str(error)}
    return {"error": RunFailedError.__name__, "text": f"{kind}: {error}".strip(": ")}


def remote_error(message: Mapping[str, Any], prefix: str = "") -> IsotrainError:
    """The error that another process has told of."""
    return errors.error_named(str(message["error"]), prefix + str(message["text"]))


def announce_wait(place: ClusterInfo, whom: str, seconds: float) -> None:
    """Tells a person, before there is a run that could, whom this process waits for, and why."""
    limit = f"for up to {seconds:g} s (timeouts.start)"
    print(f"isotrain: waiting {limit} for {whom}. {claim(place)}", file=sys.stderr, flush=True)
