"""Where the processes of a run are that an engine has started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spot:
    """Where one process is.

    Attributes:
        host: The name of its machine.
        local_rank: Among the processes of its host.
    """

    host: str
    local_rank: int


@dataclass(frozen=True)
class Layout:
    """Where the processes of a run are, and what each has there.

    Attributes:
        engine: That has started them.
        spots: Of each process, by rank.
        cores: That each may use.
        gpus: That each can see; None: nobody tells before they start.
        remarks: On how they talk with each other, for people.
    """

    engine: str
    spots: tuple[Spot, ...]
    cores: int
    gpus: int | None
    remarks: tuple[str, ...] = ()

    @property
    def most_on_a_host(self) -> int:
        """Processes on the host that has most."""
        hosts = [spot.host for spot in self.spots]
        return max(map(hosts.count, {*hosts}))
