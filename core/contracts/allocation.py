"""What an engine gives a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass


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
