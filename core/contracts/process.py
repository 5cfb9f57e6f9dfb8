"""Who a process is within its run: a pure function of the variables its launcher set."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.errors import IsotrainError

if TYPE_CHECKING:
    from isotrain.core.contracts.reporter import Reporter

VARIABLE = "ISOTRAIN_PROCESS"
LOCALHOST = "127.0.0.1"
Role = Literal["replica", "coordinator", "worker", "server"]
"""`replica`: holds replicas that step. In a parameter-server run: `coordinator` has the optimizer; `worker`,
which computes gradients; `server`, which holds parameters where the framework has such processes."""
Address = tuple[str, int]
"""Host and port."""


def runs_the_loop(role: Role) -> bool:
    """Whether a process of this role has a session; workers and servers serve one that does."""
    return role in ("replica", "coordinator")


def rank_of(worker: int) -> int:
    """Rank of a worker of a parameter-server run. Rank 0 is the coordinator; worker k has rank k + 1."""
    return worker + 1


def worker_of(rank: int) -> int:
    """The worker that a process of this rank is, in a parameter-server run."""
    return rank - 1


@dataclass(frozen=True)
class Peer:
    """One process of a run, as all of them know it.

    Attributes:
        rank: Among all, from 0.
        host: The name of its machine.
        address: Of its machine, as the others reach it.
        port: Kept for it there: for the backend's own server.
        local_rank: Among the processes of its host.
        replicas: Indices of those that live in it.
        role: What it does; see `Role`.
    """

    rank: int
    host: str
    address: str
    port: int
    local_rank: int
    replicas: tuple[int, ...]
    role: Role = "replica"


@dataclass(frozen=True)
class ProcessContext:
    """One process's place in the run.

    Attributes:
        rank: Of this process.
        replicas: Replicas in the whole run.
        run_directory: Where this process keeps the run's files: on another machine than rank 0's perhaps in
            a folder of its own.
        peers: All processes of the run, in the order of their ranks.
        extra_addresses: Where rank 0 lets the others in besides, as the parallel layout asked.
        device_mesh: The places of the run. Where every process holds one of them, this one holds that of
            its rank.
    """

    rank: int
    replicas: int
    run_directory: str
    peers: tuple[Peer, ...]
    extra_addresses: tuple[Address, ...] = ()
    device_mesh: DeviceMesh = field(default_factory=DeviceMesh)

    @functools.cached_property
    def local_peer(self) -> Peer:
        """This process, as the others know it."""
        return next(peer for peer in self.peers if peer.rank == self.rank)

    @property
    def rendezvous(self) -> Address:
        """Where the processes meet, in whatever the backend opens for that: rank 0's own port."""
        return self.peers[0].address, self.peers[0].port

    @property
    def world_size(self) -> int:
        """Processes in the run."""
        return len(self.peers)

    @property
    def local_rank(self) -> int:
        """Of this process on its host."""
        return self.local_peer.local_rank

    @property
    def local_world_size(self) -> int:
        """Processes on this host."""
        return sum(peer.host == self.local_peer.host for peer in self.peers)

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """Indices of the replicas that live in this process."""
        return self.local_peer.replicas

    @property
    def role(self) -> Role:
        """What it does; see `Role`."""
        return self.local_peer.role

    @property
    def has_session(self) -> bool:
        """Whether it runs the loop; workers and servers of a parameter-server run do not."""
        return runs_the_loop(self.role)

    def to_variables(self) -> dict[str, str]:
        """The environment variables from which `from_variables` makes this context again."""
        return {VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True)
class ServerConnection:
    """How one process finds the others, where its backend does not see to that: in a parameter-server run.

    Attributes:
        context: Its place.
        key: Known to this run's processes alone; whoever connects must prove that it has it.
        start_timeout: Seconds that the workers may take to be ready, once the coordinator is.
        answer_timeout: Seconds after which a worker without an answer counts as lost.
        reporter: Tells the launcher.
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
        """With limits that are over before the launcher's own, which would end the run."""
        return cls(context, key, timeouts["start"] / 2, timeouts["progress"] / 2, reporter)

    @property
    def server_address(self) -> Address:
        """Where the coordinator lets the others in."""
        return self.context.extra_addresses[0]

    @property
    def replica(self) -> int:
        """The replica of a worker, or 0."""
        return self.context.local_replicas[0] if self.context.local_replicas else 0

    def single_replica_context(self) -> ProcessContext:
        """The context of a group with one replica: no process group, no port."""
        own = replace(self.context.local_peer, local_rank=self.replica, replicas=(self.replica,))
        return replace(self.context, replicas=1, peers=(own,), device_mesh=DeviceMesh({DATA: 1}))


def from_variables(variables: Mapping[str, str]) -> ProcessContext | None:
    """Reads the context that isotrain's own launcher set; None outside of such a process."""
    text = variables.get(VARIABLE)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        fields["peers"] = tuple(map(peer_of, fields["peers"]))
        fields["extra_addresses"] = tuple((host, port) for host, port in fields["extra_addresses"])
        fields["device_mesh"] = DeviceMesh(**fields["device_mesh"])
        return ProcessContext(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise IsotrainError(
            f"{VARIABLE} is set but cannot be read ({error}). It is set by isotrain's launcher for"
            " the processes it starts; unset it in your shell."
        ) from error


def peer_of(fields: Mapping[str, Any]) -> Peer:
    """Makes a peer of its fields, as JSON has them."""
    return Peer(**{**fields, "replicas": tuple(fields["replicas"])})
