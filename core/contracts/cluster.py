"""What an engine gives a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessSlot:
    """Where one process is.

    Attributes:
        host: The name of its machine.
        local_rank: Among the processes of its host.
    """

    host: str
    local_rank: int


@dataclass(frozen=True)
class ClusterLayout:
    """Where the processes of a run are, and what each has there.

    Attributes:
        launcher: That has started them.
        process_slots: Of each process, by rank.
        cores: That each may use.
        gpus: That each can see; None: nobody tells before they start.
        notes: On how they talk with each other, for people.
    """

    launcher: str
    process_slots: tuple[ProcessSlot, ...]
    cores: int
    gpus: int | None
    notes: tuple[str, ...] = ()

    @property
    def max_processes_per_host(self) -> int:
        """Processes on the host that has most."""
        hosts = [spot.host for spot in self.process_slots]
        return max(map(hosts.count, {*hosts}))


@dataclass(frozen=True)
class HostSlots:
    """What one host gives.

    Attributes:
        slots: Processes that may run there.
        host: Its name; None: the engine chooses it when the run starts.
        devices: Accelerators there; None: nobody tells before the run starts.
    """

    slots: int
    host: str | None = None
    devices: int | None = None


@dataclass(frozen=True)
class Allocation:
    """What all hosts give, in the order of their ranks.

    Attributes:
        host_slots: Of each host.
    """

    host_slots: tuple[HostSlots, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their names; empty where the engine chooses them later."""
        return tuple(share.host for share in self.host_slots if share.host is not None)

    @property
    def slots(self) -> int:
        """Processes in all."""
        return sum(share.slots for share in self.host_slots)

    @property
    def devices(self) -> int | None:
        """Accelerators that every host has at least; None: nobody tells of one of them."""
        told = [share.devices for share in self.host_slots]
        known = [count for count in told if count is not None]
        return min(known) if len(known) == len(told) else None

    @property
    def is_even(self) -> bool:
        """Whether every host gives as many processes as the first."""
        return all(share.slots == self.host_slots[0].slots for share in self.host_slots)
