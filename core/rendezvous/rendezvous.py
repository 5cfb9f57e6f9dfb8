"""Rendezvous of processes started from outside: each sends facts, rank 0 decides, all get the decision."""

from __future__ import annotations

import atexit
import contextlib
import logging
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
from isotrain.core.planning.cluster_environment import explain_rank
from isotrain.core.rendezvous.shared_secret import RunKey
from isotrain.core.system.deadline import Deadline
from isotrain.core.transport.channel import Channel, finish
from isotrain.core.transport.rank_zero_server import (
    LONG_WAIT_SECONDS,
    RankZeroServer,
)

Facts = Mapping[str, Any]
"""Facts of one process: JSON values."""
DecisionFunction = Callable[[Sequence[Facts]], dict[str, Any]]
"""Makes a decision from the facts of all processes, by rank; raises if they do not match."""

_LOG = logging.getLogger("isotrain.rendezvous")
_POLL_SECONDS = 0.02
LATE_SECONDS = 5.0
"""Time in which rank 0 tells late ranks that the run has failed, unless it has waited for them before."""
_GONE_SECONDS = 1.0
"""Time in which a closed connection of a rank is noticed."""
RECONNECT_SECONDS = 2.0
"""Time for a rank that closed its connection to reconnect: its attempt may have timed out too early."""
_RANK_ZERO_FIRST_SECONDS = 8.0
"""Time for which the others wait for rank 0 to close: a launcher may end all processes once one has failed,
and rank 0 is the one that reports why."""
_MARGIN_SECONDS = 10.0
"""Time for which the others wait longer than rank 0, which can tell which rank is missing."""


class Rendezvous(ABC):
    """Agreement of all processes before the run begins (compare torchelastic's rendezvous).

    Collective: every process calls the same methods in the same order.

    Attributes:
        cluster_info: Cluster info of this process.
        key: Secret key of the run.
        timeout: Seconds that each agreement may take.
    """

    def __init__(self, cluster_info: ClusterInfo, key: RunKey, timeout: float) -> None:
        self.cluster_info = cluster_info
        self.key = key
        self.timeout = timeout
        self._has_failed = False

    @abstractmethod
    def agree(self, facts: Facts, decide: DecisionFunction) -> dict[str, Any]:
        """Returns what rank 0 decides on the facts of all processes, the same on every process. Collective.

        Raises:
            IsotrainError: The same on every process: the error of `decide`, or which process failed.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tells the other processes that this one has failed.

        Rank 0 keeps its connections open until its program ends or joins another run.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connections, once all messages have been read."""

    @contextlib.contextmanager
    def broadcasting_errors(self) -> Iterator[None]:
        """Context in which any error is sent to the other processes (`fail`)."""
        try:
            yield
        except BaseException as error:
            if not self._has_failed:
                self._has_failed = True
                self.fail(error)
            raise


class RendezvousHost(Rendezvous):
    """The rendezvous on rank 0: gathers the facts, decides, and sends the decision.

    Attributes:
        channels: Channels to the other ranks, by rank.
    """

    _left_open: ClassVar[RendezvousHost | None] = None
    """Rendezvous of an earlier, failed run of this program."""

    def __init__(
        self, cluster_info: ClusterInfo, key: RunKey, timeout: float, server: RankZeroServer
    ) -> None:
        super().__init__(cluster_info, key, timeout)
        self.channels: dict[int, Channel] = {}
        self._server = server
        self._late_seconds = LATE_SECONDS
        self._has_announced_wait = False
        self._hosts: dict[int, str] = {}
        """Rank to host name, as far as received."""
        self._closed_since: dict[int, float] = {}
        """Rank to the time when its connection was first seen closed."""

    def agree(self, facts: Facts, decide: DecisionFunction) -> dict[str, Any]:
        with self.broadcasting_errors():
            gathered = self._gather_facts()
            decision = decide([facts, *(gathered[rank] for rank in sorted(gathered))])
        for channel in self.channels.values():
            channel.send({"decision": decision})
        return decision

    def _gather_facts(self) -> dict[int, Facts]:
        """The facts of the other ranks in this agreement, by rank.

        Raises:
            IsotrainError: A rank has failed, did not connect in time, or left.
        """
        gathered: dict[int, Facts] = {}
        began = time.monotonic()
        deadline = began + self.timeout
        while missing := [
            rank for rank in range(1, self.cluster_info.world_size) if rank not in gathered
        ]:
            self._accept_clients()
            for rank in missing:
                facts = self._receive_facts(rank)
                if facts is not None:
                    gathered[rank] = facts
                    self._hosts[rank] = str(facts.get("host", self._hosts.get(rank, "")))
            if time.monotonic() > began + LONG_WAIT_SECONDS and not self._has_announced_wait:
                self._announce_absent()
            if time.monotonic() > deadline:
                self._late_seconds = 0.0
                raise PeerLostError(self._timeout_message(missing))
            time.sleep(_POLL_SECONDS)
        return gathered

    def _announce_absent(self) -> None:
        """Prints the ranks that have not connected, once."""
        self._has_announced_wait = True
        ranks = (
            rank for rank in range(1, self.cluster_info.world_size) if rank not in self.channels
        )
        if absent := ", ".join(map(str, ranks)):
            awaited = f"rank {absent} at {self._server.location}"
            announce_wait(self.cluster_info, awaited, self.timeout)

    def _accept_clients(self) -> None:
        duplicate = None
        for rank, connection in self._server.arrivals():
            if 0 < rank < self.cluster_info.world_size and not self._is_connected(rank):
                self.channels[rank] = Channel(connection)
                self._closed_since.pop(rank, None)
            else:  # go on: ranks that arrived at the same time must get the error too
                connection.close()
                duplicate = rank
        for problem in self._server.rejected.values():
            raise PlanError(problem)
        if duplicate is not None:
            raise IsotrainError(
                f"two processes say that they are rank {duplicate} of the run's"
                f" {self.cluster_info.world_size}. Check which processes {self.cluster_info.environment}"
                f" was told to start. {explain_rank(self.cluster_info)}"
            )

    def _is_connected(self, rank: int) -> bool:
        """Whether this rank has a connection that is still open."""
        channel = self.channels.get(rank)
        if channel is None:
            return False
        has_gone = channel.has_gone(_GONE_SECONDS)
        if has_gone:
            channel.close()
        return not has_gone

    def _receive_facts(self, rank: int) -> Facts | None:
        channel = self.channels.get(rank)
        messages = [] if channel is None else channel.read()
        if messages is None:
            now = time.monotonic()
            if (
                rank not in self._hosts
                and now - self._closed_since.setdefault(rank, now) < RECONNECT_SECONDS
            ):
                return None
            raise PeerLostError(
                f"{self._name(rank)} left before the run began: its connection to rank 0 was closed. Its"
                f" output, which {self.cluster_info.environment} has, says more."
            )
        if channel is None or not messages:
            return None
        (message, _), *rest = messages
        channel.put_back(rest)
        if "error" in message:
            raise remote_error(message, f"{self._name(rank)}: ")
        facts: Facts = message["facts"]
        return facts

    def _name(self, rank: int) -> str:
        host = self._hosts.get(rank)
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def _timeout_message(self, missing: Sequence[int]) -> str:
        connected = [rank for rank in missing if rank in self.channels]
        silent = ", ".join(map(self._name, connected))
        absent = ", ".join(str(rank) for rank in missing if rank not in connected)
        if connected:
            return f"{silent} sent nothing for {self.timeout:g} s before the run began."
        return (
            f"rank {absent} of {self.cluster_info.world_size} never came to {self._server.location}, in"
            f" {self.timeout:g} s (timeouts.start). Was it started, can its host reach this one there, and"
            f" has it the same key? {self._server.rejected_clients} clients were rejected."
            f" {explain_rank(self.cluster_info)}"
        )

    def reachable_address(self, facts: Sequence[Facts]) -> str:
        """Address of this host by which the other ranks have connected, preferably from other hosts."""
        others = [rank for rank in self.channels if facts[rank]["host"] != facts[0]["host"]]
        return self.channels[min(others)].local_address if others else LOCALHOST

    def fail(self, error: BaseException) -> None:
        message = as_message(error)
        self._close_later()
        deadline = Deadline(self._late_seconds)
        sent_to: set[int] = set()
        while True:
            with contextlib.suppress(IsotrainError):
                self._accept_clients()
            for rank in self.channels.keys() - sent_to:
                self.channels[rank].send(message)
                sent_to.add(rank)
            informed = sent_to | self._server.rejected.keys()
            if len(informed) == self.cluster_info.world_size - 1 or deadline.is_over:
                break
            time.sleep(_POLL_SECONDS)
        self.close_server()

    def broadcast_failure(self, error: BaseException) -> None:
        """Sends the other ranks the error of a run that had begun."""
        self._has_failed = True
        self._close_later()
        reported: BaseException = error
        if not isinstance(error, RunFailedError):
            text = f"{type(error).__name__}: {error}".strip(": ")
            reported = EndedError(f"the run was ended on rank 0: {text}")
        elif error.was_asked:
            reported = EndedError(str(error))
        for channel in self.channels.values():
            channel.send(as_message(reported))

    def _close_later(self) -> None:
        """Leaves closing to the end of this program, or to its next run."""
        atexit.register(self.close)
        RendezvousHost._left_open = self

    @classmethod
    def close_previous(cls) -> None:
        """Closes the connections of an earlier, failed run: its other ranks wait for that."""
        if cls._left_open is not None:
            cls._left_open.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        if RendezvousHost._left_open is self:
            RendezvousHost._left_open = None
        self.close_server()
        finish(self.channels.values())

    def close_server(self) -> None:
        """Stops accepting connections."""
        self._server.close()


class RendezvousClient(Rendezvous):
    """The rendezvous on every other rank.

    Attributes:
        channel: Channel to rank 0.
    """

    def __init__(
        self, cluster_info: ClusterInfo, key: RunKey, timeout: float, channel: Channel
    ) -> None:
        super().__init__(cluster_info, key, timeout)
        self.channel = channel

    def agree(self, facts: Facts, decide: DecisionFunction) -> dict[str, Any]:
        self.channel.send({"facts": dict(facts)})
        message = self.channel.wait(self.timeout + _MARGIN_SECONDS)
        if message is None:
            raise PeerLostError("rank 0 is gone, or sends nothing, before the run began.")
        header, _ = message
        if "error" in header:
            raise remote_error(header)
        decision: dict[str, Any] = header["decision"]
        return decision

    def fail(self, error: BaseException) -> None:
        self.channel.send(as_message(error))
        self.close()

    def close(self) -> None:
        leave_rank_zero(self.channel)


def leave_rank_zero(channel: Channel) -> None:
    """Closes the channel of another rank, once rank 0 has closed it or some seconds have passed."""
    channel.await_end(_RANK_ZERO_FIRST_SECONDS)
    finish([channel])


def as_message(error: BaseException) -> dict[str, str]:
    """Encodes an error as a message header of JSON values."""
    error_type = type(error).__name__
    if isinstance(error, IsotrainError):
        return {"error": error_type, "text": str(error)}
    return {"error": RunFailedError.__name__, "text": f"{error_type}: {error}".strip(": ")}


def remote_error(message: Mapping[str, Any], prefix: str = "") -> IsotrainError:
    """Decodes an error that another process has sent (`as_message`)."""
    return errors.error_named(str(message["error"]), prefix + str(message["text"]))


def announce_wait(cluster_info: ClusterInfo, awaited: str, timeout: float) -> None:
    """Logs what this process waits for, and why; the run cannot report it yet."""
    limit = f"for up to {timeout:g} s (timeouts.start)"
    _LOG.warning("waiting %s for %s. %s", limit, awaited, explain_rank(cluster_info))
