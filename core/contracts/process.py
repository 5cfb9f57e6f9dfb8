"""The processes of a run, and the context of one, a pure function of the variables that its launcher set."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.errors import IsotrainError

if TYPE_CHECKING:
    from isotrain.core.contracts.reporter import Reporter

VARIABLE = "ISOTRAIN_PROCESS"
LOCALHOST = "127.0.0.1"
Role = Literal["replica", "coordinator", "worker", "server"]
"""`replica`: holds replicas. In a parameter-server run: `coordinator`, which runs the loop; `worker`,
which computes gradients; `server`, which holds parameters where the framework has such processes."""
Address = tuple[str, int]
"""Host and port."""


def rank_of(worker: int) -> int:
    """Rank of a worker of a parameter-server run: worker k has rank k + 1, the coordinator rank 0."""
    return worker + 1


def worker_of(rank: int) -> int:
    """Index of the worker with this rank; inverse of `rank_of`."""
    return rank - 1


@dataclass(frozen=True)
class ProcessInfo:
    """One process of a run: its rank, its host, and what it holds.

    Attributes:
        rank: Rank in the run, from 0.
        host: Host name.
        local_rank: Rank among the processes of the host, from 0.
        replicas: Indices of the replicas in the process.
        role: Role of the process; see `Role`.
    """

    rank: int
    host: str = LOCALHOST
    local_rank: int = 0
    replicas: tuple[int, ...] = ()
    role: Role = "replica"

    @property
    def has_session(self) -> bool:
        """Whether the process runs the training loop; workers and servers do not."""
        return self.role in ("replica", "coordinator")


def named_replicas(processes: Sequence[ProcessInfo], replicas: Collection[int]) -> str:
    """Some replicas by the ranks and hosts of their processes, for messages.

    A process of several replicas comes with their numbers: `replicas 0, 2 of rank 0 on node1`.

    Args:
        processes: Processes of the run.
        replicas: Indices of the replicas.
    """
    named = []
    for process in processes:
        found = [str(each) for each in process.replicas if each in replicas]
        if not found:
            continue
        rank = f"rank {process.rank} on {process.host}"
        if len(process.replicas) > 1:
            noun = "replica" if len(found) == 1 else "replicas"
            rank = f"{noun} {', '.join(found)} of {rank}"
        named.append(rank)
    return ", ".join(named)


@dataclass(frozen=True)
class ProcessContext:
    """Rank of one process of a run, all processes with their addresses, and the device mesh.

    Attributes:
        rank: Rank of this process.
        replicas: Number of replicas in the run.
        run_directory: Directory for this process's files of the run; may differ from rank 0's on other hosts.
        processes: All processes of the run, by rank.
        addresses: Address of each of `processes`, as other hosts reach it: its host, and a port that is
            reserved for the process, for the backend to listen on.
        extra_addresses: Further addresses of rank 0, one for each extra port of the parallel layout.
        device_mesh: Device mesh of the run. Where each process holds one position, its rank is the index.
        join_seconds: Seconds in which the processes must find each other; None: the timeout of collectives.
        joins: Whether this process joins an elastic run that is training. `processes` are then those of the
            start and itself, and `rank` is its number among all that have been in the run.
    """

    rank: int
    replicas: int
    run_directory: str
    processes: tuple[ProcessInfo, ...]
    addresses: tuple[Address, ...]
    extra_addresses: tuple[Address, ...] = ()
    device_mesh: DeviceMesh = field(default_factory=DeviceMesh)
    join_seconds: float | None = None
    joins: bool = False

    @functools.cached_property
    def local_process(self) -> ProcessInfo:
        """This process."""
        return next(process for process in self.processes if process.rank == self.rank)

    @property
    def address(self) -> Address:
        """Address of this process."""
        return self.addresses[self.processes.index(self.local_process)]

    @property
    def rendezvous(self) -> Address:
        """Rendezvous address for the backend's process group: that of rank 0."""
        return self.addresses[0]

    @property
    def world_size(self) -> int:
        """Number of processes in the run."""
        return len(self.processes)

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this host."""
        return self.local_process.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of processes on this host."""
        return sum(process.host == self.local_process.host for process in self.processes)

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """Indices of the replicas in this process."""
        return self.local_process.replicas

    @property
    def role(self) -> Role:
        """Role of this process; see `Role`."""
        return self.local_process.role

    @property
    def has_session(self) -> bool:
        """Whether this process runs the training loop; workers and servers do not."""
        return self.local_process.has_session

    def to_variables(self) -> dict[str, str]:
        """Environment variables that `from_variables` reads."""
        return {VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True)
class ServerConnection:
    """Address, key and timeouts by which a process joins a parameter-server run.

    Attributes:
        context: Process context of this process.
        key: Secret of this run's processes, which every connection must prove to know.
        start_timeout: Seconds that workers may take to become ready after the coordinator.
        answer_timeout: Seconds without an answer after which a worker counts as lost.
        reporter: Reporter to the launcher.
    """

    context: ProcessContext
    key: bytes = field(repr=False)
    start_timeout: float
    answer_timeout: float
    reporter: Reporter

    @classmethod
    def of(
        cls,
        context: ProcessContext,
        key: bytes,
        timeouts: Mapping[str, float],
        reporter: Reporter,
    ) -> ServerConnection:
        """Connection settings with half of the launcher's timeouts, to expire before these end the run."""
        return cls(context, key, timeouts["start"] / 2, timeouts["progress"] / 2, reporter)

    @property
    def server_address(self) -> Address:
        """Host and port that the coordinator listens on."""
        return self.context.extra_addresses[0]

    @property
    def replica(self) -> int:
        """Replica index of a worker; 0 for other roles."""
        return self.context.local_replicas[0] if self.context.local_replicas else 0

    def single_replica_context(self) -> ProcessContext:
        """Context for a group with one replica, without process group and port."""
        process = replace(
            self.context.local_process, local_rank=self.replica, replicas=(self.replica,)
        )
        return replace(
            self.context,
            replicas=1,
            processes=(process,),
            addresses=(self.context.address,),
            device_mesh=DeviceMesh({DATA: 1}),
        )


def from_variables(variables: Mapping[str, str]) -> ProcessContext | None:
    """Process context that isotrain's launcher set; None in a process started by anything else.

    Raises:
        IsotrainError: The variable is set to something else.
    """
    text = variables.get(VARIABLE)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        fields["processes"] = tuple(
            ProcessInfo(**{**process, "replicas": tuple(process["replicas"])})
            for process in fields["processes"]
        )
        for name in ("addresses", "extra_addresses"):
            fields[name] = tuple((host, port) for host, port in fields[name])
        mesh = fields["device_mesh"]
        fields["device_mesh"] = DeviceMesh(mesh["sizes"], tuple(mesh["stage_processes"]))
        return ProcessContext(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise IsotrainError(
            f"{VARIABLE} is set but cannot be read ({error}). It is set by isotrain's launcher for"
            " the processes it starts; unset it in your shell."
        ) from error
