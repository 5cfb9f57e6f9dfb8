"""What a launched process is told besides its spec and setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.process import Address, ProcessContext
from isotrain.core.contracts.reporter import Reporter


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
        own = replace(self.context.own, local_rank=self.replica, replicas=(self.replica,))
        return replace(self.context, replicas=1, peers=(own,), device_mesh=DeviceMesh({DATA: 1}))
