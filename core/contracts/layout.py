"""Where the processes of a run are that an engine has started."""

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
