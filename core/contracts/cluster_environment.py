"""The contract of an environment: who a process is, from the variables that its engine has set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from isotrain.core.errors import ClusterInfoError

T = TypeVar("T")


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


class EnvReader:
    """Reads variables that an engine sets, and notes which. One that is set to nothing is not set."""

    def __init__(self, engine: str, variables: Mapping[str, str]) -> None:
        self._engine = engine
        self._variables = variables
        self._read: dict[str, None] = {}

    @property
    def variables_read(self) -> tuple[str, ...]:
        """The names of the set variables that were asked for so far, in order."""
        return tuple(self._read)

    def all_set(self, *names: str) -> bool:
        """Whether the engine has set these variables: all of them, or none.

        Raises:
            ClusterInfoError: Some of them are set, and others are not.
        """
        found = [name for name in names if self.text(name) is not None]
        missing = [name for name in names if name not in found]
        if found and missing:
            raise ClusterInfoError(
                f"{self._engine}: {_are_set(found)}, but not {' and '.join(missing)}; expected all of"
                f" {', '.join(names)}, as this engine sets them, or none. Set what is missing, or unset"
                " the others."
            )
        return bool(found)

    def text(self, name: str) -> str | None:
        """The text of a variable; None: it is not set."""
        found = self._variables.get(name, "").strip()
        if not found:
            return None
        self._read[name] = None
        return found

    def required_text(self, name: str) -> str:
        """The text of a variable without which the place is not whole.

        Raises:
            ClusterInfoError: It is not set.
        """
        found = self.text(name)
        if found is None:
            self.all_set(*self._read, name)
        return found or ""

    def number(self, name: str) -> int | None:
        """The whole number, of at least 0, that a variable is set to; None: it is not set.

        Raises:
            ClusterInfoError: It is set to something else.
        """
        found = self.text(name)
        if found is None:
            return None
        if not (found.isascii() and found.isdecimal()):
            raise ClusterInfoError(
                f"{self._engine}: {name} is {found!r}; expected a whole number of at least 0."
            )
        return int(found)

    def required_number(self, name: str) -> int:
        """The number of a variable without which the place is not whole.

        Raises:
            ClusterInfoError: It is not set, or to something else.
        """
        self.required_text(name)
        return self.number(name) or 0

    def required_list(self, name: str, read: Callable[[str], list[T]]) -> tuple[T, ...]:
        """What `host_list` or `counts_per_host` reads in a variable without which the place is not whole.

        Raises:
            ClusterInfoError: It is not set, or to something else.
        """
        text = self.required_text(name)
        try:
            return tuple(read(text))
        except ClusterInfoError as error:
            raise ClusterInfoError(f"{self._engine}: {name}: {error}") from error


def _are_set(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set"
