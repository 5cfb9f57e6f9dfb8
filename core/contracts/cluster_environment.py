"""The contract of a cluster environment: rank and world size from the variables that a launcher set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.errors import ClusterInfoError

T = TypeVar("T")


@dataclass(frozen=True)
class ClusterInfo:
    """Rank, world size and hosts of one process, as its launcher set them; None or empty where unknown.

    Attributes:
        environment: Name of the cluster environment that read it.
        variables_read: Names of the environment variables it was read from.
        rank: Rank of this process among all that the launcher started, from 0.
        world_size: Number of processes that the launcher started.
        job: Identifier of the launch, equal in all its processes and, as far as the launcher allows, unlike
            that of concurrent launches; ports and file names are derived from it. Not a secret.
        local_rank: Rank of this process on its host, from 0.
        local_world_size: Number of processes on this host.
        node_rank: Index of this host, from 0.
        host: Name of this host, as the launcher has it.
        hosts: Names of all hosts, by node rank.
        coordinator: Host of rank 0, or the launcher's nearest equivalent, such as its master address.
        port: Port on the coordinator's host that the launcher chose and leaves free; rank 0 listens on it.
        restarts: Number of times that the launcher has restarted the processes.
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
        """Whether all processes are known to be on one host."""
        return self.local_world_size == self.world_size or len(self.hosts) == 1

    def __post_init__(self) -> None:
        """Validates the ranks.

        Raises:
            ClusterInfoError: A rank is not below its world size.
        """
        _require_below("rank", self.rank, "processes", self.world_size, self)
        _require_below("local rank", self.local_rank, "on its host", self.local_world_size, self)
        _require_below("node rank", self.node_rank, "hosts", len(self.hosts) or None, self)


@dataclass(frozen=True)
class ClusterLayout:
    """Hosts and resources of the processes that a launcher has started.

    Attributes:
        launcher: Name of the launcher.
        processes: Host and local rank of each process, by rank; the plan sets replicas and roles.
        cores: CPU cores per process.
        gpus: GPUs visible to each process; None where unknown before the framework starts.
        notes: Notes for the user on how the processes communicate.
    """

    launcher: str
    processes: tuple[ProcessInfo, ...]
    cores: int
    gpus: int | None
    notes: tuple[str, ...] = ()

    @property
    def max_processes_per_host(self) -> int:
        """Largest number of processes on one host."""
        hosts = [process.host for process in self.processes]
        return max(map(hosts.count, {*hosts}))


class ClusterEnvironment(ABC):
    """Reads the environment variables of one scheduler or launcher, such as SLURM, MPI or torchrun.

    Attributes:
        name: Name of the scheduler or launcher, under which it is registered.
        summary: One line for listings.
        nested_in: Schedulers and launchers that often start this one, or in whose jobs it runs. If both
            recognize a process, this one wins, and incomplete variables of the others are ignored. Two
            environments of which neither is nested in the other must not recognize the same process.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    nested_in: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        """Cluster info of the process that has these environment variables.

        A pure function: it reads no other variables, files, sockets or clocks. `EnvReader` helps.

        Args:
            variables: Environment variables of the process.

        Returns:
            Rank, world size and what else is set; None if this launcher did not start the process.

        Raises:
            ClusterInfoError: The variables are incomplete or invalid.
        """

    def why_not_elastic(self, variables: Mapping[str, str]) -> str | None:
        """Reason why the other processes do not go on when one is lost; None: they do.

        Args:
            variables: Environment variables of a process.
        """
        return (
            f"{self.name} has started the processes, and may end all when one is lost. Start them by srun or"
            " Ray, or by the local launcher"
        )

    def secret(self, variables: Mapping[str, str]) -> str | None:
        """Secret that only the processes of one launch share; None if the launcher sets none.

        It must be random, new for every launch, and never on a command line.
        """
        return None


def _require_below(
    what: str, number: int | None, of_what: str, size: int | None, cluster_info: ClusterInfo
) -> None:
    if number is not None and size is not None and not 0 <= number < size:
        raise ClusterInfoError(
            f"{cluster_info.environment}: the {what} is {number} of {size} {of_what}, as"
            f" {', '.join(cluster_info.variables_read)} say; expected at least 0 and less than {size}. Unset"
            " these variables if you set them, or start the processes again."
        )


class EnvReader:
    """Reads and validates a launcher's environment variables, and records their names.

    A variable that is set to an empty text counts as unset.
    """

    def __init__(self, launcher: str, variables: Mapping[str, str]) -> None:
        """Starts with no variable read.

        Args:
            launcher: Name of the launcher, for error messages.
            variables: Environment variables of the process.
        """
        self._launcher = launcher
        self._variables = variables
        self._read: dict[str, None] = {}

    @property
    def variables_read(self) -> tuple[str, ...]:
        """Names of the variables read so far that are set, in order."""
        return tuple(self._read)

    def all_set(self, *names: str) -> bool:
        """Whether all of these variables are set, rather than none.

        Raises:
            ClusterInfoError: Some are set and others are not.
        """
        present = [name for name in names if self.text(name) is not None]
        missing = [name for name in names if name not in present]
        if present and missing:
            raise ClusterInfoError(
                f"{self._launcher}: {_are_set(present)}, but not {' and '.join(missing)}; expected all of"
                f" {', '.join(names)}, as {self._launcher} sets them, or none. Set what is missing, or unset"
                " the others."
            )
        return bool(present)

    def text(self, name: str) -> str | None:
        """Text of a variable, stripped; None if it is unset."""
        text = self._variables.get(name, "").strip()
        if not text:
            return None
        self._read[name] = None
        return text

    def required_text(self, name: str) -> str:
        """Text of a variable that must be set if the ones read before are.

        Raises:
            ClusterInfoError: The variable is unset.
        """
        text = self.text(name)
        if text is None:
            self.all_set(*self._read, name)
        return text or ""

    def number(self, name: str) -> int | None:
        """Integer, at least 0, of a variable; None if it is unset.

        Raises:
            ClusterInfoError: The variable is not such an integer.
        """
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal()):
            raise ClusterInfoError(
                f"{self._launcher}: {name} is {text!r}; expected an integer of at least 0."
            )
        return int(text)

    def required_number(self, name: str) -> int:
        """Integer, at least 0, of a variable that must be set if the ones read before are.

        Raises:
            ClusterInfoError: The variable is unset, or is not such an integer.
        """
        self.required_text(name)
        return self.number(name) or 0

    def required_list(self, name: str, parse: Callable[[str], list[T]]) -> tuple[T, ...]:
        """Items of a variable that must be set if the ones read before are.

        Args:
            name: Name of the variable.
            parse: Parser of its text: `host_list` or `counts_per_host`.

        Raises:
            ClusterInfoError: The variable is unset, or cannot be parsed.
        """
        text = self.required_text(name)
        try:
            return tuple(parse(text))
        except ClusterInfoError as error:
            raise ClusterInfoError(f"{self._launcher}: {name}: {error}") from error


def _are_set(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set"
