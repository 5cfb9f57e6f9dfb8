"""Who a process is within its run: a pure function of the variables its launcher set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from isotrain.core.contracts.mesh import Mesh
from isotrain.core.errors import IsotrainError

VARIABLE = "ISOTRAIN_PROCESS"
LOCALHOST = "127.0.0.1"
Role = Literal["replica", "coordinator", "worker", "server"]
"""`replica`: holds replicas that step. In a served run: `coordinator`, with loop and optimizer; `worker`,
which computes gradients; `server`, which holds parameters where the framework has such processes."""


def runs_the_loop(role: Role) -> bool:
    """Whether a process of this role has a session; workers and servers serve one that does."""
    return role in ("replica", "coordinator")


def rank_of(worker: int) -> int:
    """The rank of a worker of a served run, which has its replica's number: rank 0 is the coordinator."""
    return worker + 1


def worker_of(rank: int) -> int:
    """The worker that a process of this rank is, in a served run."""
    return rank - 1


@dataclass(frozen=True)
class ProcessContext:
    """One process's place in the run.

    Attributes:
        rank: Of this process among all, from 0.
        world_size: Processes in the run.
        local_rank: Of this process on its host.
        local_world_size: Processes on this host.
        replicas: Replicas in the whole run.
        local_replicas: Indices of the replicas that live in this process.
        addresses: `host:port` of every rank, for the backend's own server; the first is the coordinator. In a
            served run one more, where its coordinator lets the others in.
        run_directory: Where this run keeps its files.
        role: What it does; see `Role`.
        mesh: The places of the run. Where every process holds one of them, this one holds that of its rank.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    replicas: int
    local_replicas: tuple[int, ...]
    addresses: tuple[str, ...]
    run_directory: str
    role: Role = "replica"
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def coordinator(self) -> tuple[str, int]:
        """Host and port of rank 0."""
        host, _, port = self.addresses[0].rpartition(":")
        return host, int(port)

    @property
    def has_session(self) -> bool:
        """Whether it runs the loop; workers and servers of a served run do not."""
        return runs_the_loop(self.role)

    def to_variables(self) -> dict[str, str]:
        """The environment variables from which `from_variables` makes this context again."""
        return {VARIABLE: json.dumps(asdict(self))}


def from_variables(variables: Mapping[str, str]) -> ProcessContext | None:
    """Reads the context that isotrain's own launcher set; None outside of such a process."""
    text = variables.get(VARIABLE)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        fields["local_replicas"] = tuple(fields["local_replicas"])
        fields["addresses"] = tuple(fields["addresses"])
        fields["mesh"] = Mesh(**fields["mesh"])
        return ProcessContext(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise IsotrainError(
            f"{VARIABLE} is set but cannot be read ({error}). It is set by isotrain's launcher for"
            " the processes it starts; unset it in your shell."
        ) from error
