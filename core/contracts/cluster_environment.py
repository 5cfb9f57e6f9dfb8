"""The contract of an environment: who a process is, from the variables that its engine has set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from isotrain.core.errors import ClusterInfoError


@dataclass(frozen=True)
class ClusterInfo:
    """What an engine tells one process about itself; None and empty where it does not tell.

    Attributes:
        environment: The name of the environment that read it.
        variables_read: The variables that it was read from.
        rank: Of this process among all that the engine started, from 0.
        world_size: How many it started.
        job: Names what was started on the whole cluster, equally in all its processes and, as far as the
            engine allows, unlike what is started beside it: for ports and keys. Not a secret.
        local_rank: Of this process on its host.
        local_world_size: Processes on this host.
        node_rank: Of this host, from 0.
        host: This process's, as the engine calls it.
        hosts: All, by node rank.
        coordinator: The host of rank 0, or what the engine tells that is most often the same.
        port: One that the engine chose on the coordinator's host and does not use itself: rank 0 lets the
            others in there.
        restarts: How often the engine has started the processes again.
    """

    environment: str
    variables_read: tuple[str, ...]
    rank: int
    world_size: int
    job: str
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    host: str | None = None
    hosts: tuple[str, ...] = ()
    coordinator: str | None = None
    port: int | None = None
    restarts: int = 0

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes are known to be on one machine."""
        return self.local_world_size == self.world_size or len(self.hosts) == 1

    def __post_init__(self) -> None:
        """Refuses what cannot be.

        Raises:
            ClusterInfoError: A rank is not below its size.
        """
        _require_below("rank", self.rank, "processes", self.world_size, self)
        _require_below("local rank", self.local_rank, "on its host", self.local_world_size, self)
        _require_below("node rank", self.node_rank, "hosts", len(self.hosts) or None, self)


class ClusterEnvironment(ABC):
    """Tells who a process is, if one engine started it.

    Attributes:
        name: The engine, under which it is registered.
        summary: One line for listings.
        nested_in: Engines that often start this one, or in whose jobs it runs: where both claim a process,
            this one is right, and what is half set for the others does not matter. Of engines of which
            neither names the other, only one may claim a process.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    nested_in: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        """Reads the place of the process that has these variables; None: this engine did not start it.

        Looks at nothing else: no other variables, no file, no socket, no clock. See `EnvReader`.

        Raises:
            ClusterInfoError: The variables are half set, or not what they should be.
        """

    def secret(self, variables: Mapping[str, str]) -> str | None:
        """What the engine has told all processes that it started together, and nobody else; None: nothing.

        Made anew for each of its jobs, of random bits, and on no command line.
        """
        return None


def _require_below(
    what: str, number: int | None, of_what: str, size: int | None, place: ClusterInfo
) -> None:
    if number is not None and size is not None and not 0 <= number < size:
        raise ClusterInfoError(
            f"{place.environment}: the {what} is {number} of {size} {of_what}, as"
            f" {', '.join(place.variables_read)} say; expected at least 0 and less than {size}. Unset these"
            " variables if you set them, or start the processes anew."
        )
