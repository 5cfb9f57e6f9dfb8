"""Membership of an elastic run: which of its processes are there, and from which state they go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.process import Address, ProcessContext, ProcessInfo

JOIN_SECONDS = 10.0
"""Time in which the members of a new process group must have found each other."""


@dataclass(frozen=True)
class Membership:
    """Processes that form one process group of an elastic run, and the state that they continue from.

    Members are named by their ranks in the first group, which logs and the launcher keep; processes that are
    started later have the numbers after that. In the new group a member's rank is its index among them.

    Attributes:
        generation: Number of the process group; the first one of a run is 0.
        members: First ranks of the members, ascending.
        ports: A port of each member on its host; they meet at that of the first.
        source: Member whose state all take.
        behind: Members that take the state of the source: theirs is older or differs, or they have none.
        done: Number of steps in that state.
        metrics_collected: Whether the source has reduced the metrics of the epoch; see `Interrupted`.
        reported: Number of steps whose losses the launcher has received.
        epochs: Number of epochs whose end the launcher has received.
        scalars: Number of steps whose logged scalars the launcher has received.
        folder: Folder of this machine by which the state is handed over; None: the state is sent.
        joined: First rank, host and address of each member that was not there at the start.
    """

    generation: int
    members: tuple[int, ...]
    ports: tuple[int, ...]
    source: int
    behind: tuple[int, ...]
    done: int
    metrics_collected: bool
    reported: int
    epochs: int
    scalars: int
    folder: str | None
    joined: tuple[tuple[int, str, str], ...] = ()

    def to_bytes(self) -> bytes:
        """The membership as JSON, for `from_bytes`."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes | str) -> Membership:
        """Membership that `to_bytes` wrote."""
        fields = json.loads(text)
        tuples = {name: tuple(fields[name]) for name in ("members", "ports", "behind")}
        joined = tuple((member, host, address) for member, host, address in fields["joined"])
        return cls(**{**fields, **tuples, "joined": joined})

    def context(self, first: ProcessContext) -> ProcessContext:
        """Process context of a member in this group.

        Args:
            first: The process context with which it was started.
        """
        joined = {member: (host, address) for member, host, address in self.joined}
        hosts = [joined.get(member) or _host_at_start(member, first) for member in self.members]
        processes = tuple(
            replace(
                first.local_process,
                rank=rank,
                host=host,
                local_rank=[each for each, _ in hosts[:rank]].count(host),
                replicas=(rank,),
            )
            for rank, (host, _) in enumerate(hosts)
        )
        return replace(
            first,
            rank=self.members.index(first.rank),
            replicas=len(processes),
            processes=processes,
            addresses=tuple(
                (address, port) for (_, address), port in zip(hosts, self.ports, strict=True)
            ),
            device_mesh=DeviceMesh({DATA: len(processes)}),
            join_seconds=JOIN_SECONDS,
            joins=False,
        )


def newcomer_context(
    first: ProcessContext, rank: int, host: str, address: Address
) -> ProcessContext:
    """Process context of a process that joins, before it is a member.

    Args:
        first: Process context of a process of the start.
        rank: Number of the process among all that have been in the run.
        host: Name of its host.
        address: Its address.
    """
    return replace(
        first,
        rank=rank,
        processes=(*first.processes, ProcessInfo(rank, host, replicas=(0,))),
        addresses=(*first.addresses, address),
        joins=True,
    )


def _host_at_start(member: int, first: ProcessContext) -> tuple[str, str]:
    """Host of a member that was there at the start, and its address."""
    return first.processes[member].host, first.addresses[member][0]
