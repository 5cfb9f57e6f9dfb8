"""The contract of a launcher: what starts the processes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.core.contracts.allocation import Allocation
from isotrain.core.contracts.usability import Availability
from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.events import OnEvent
    from isotrain.core.contracts.job import Job

LOCAL = "local"
"""The launcher that is used unless another is asked for."""


@dataclass(frozen=True)
class LauncherChoice:
    """A launcher, as it was asked for.

    Attributes:
        name: The name it is registered under.
        options: The keyword arguments that it is made with.
    """

    name: str = LOCAL
    options: Mapping[str, Any] = field(default_factory=dict)


class Launcher(ABC):
    """Starts a run's processes, watches them, and brings back what they returned.

    Attributes:
        name: The name it is registered under.
        summary: One line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    def availability(self) -> Availability:
        """Looks whether it can start runs from here, starting nothing; plans are made also where not."""
        return Availability(True)

    def allocation(self) -> Allocation | None:
        """What there is to run on; None: this machine, and as many processes as are asked for.

        Raises:
            PlanError: The options contradict each other or what there is.
        """
        return None

    def refuses(self, adapter: Adapter, processes: int) -> str | None:
        """Why it does not start runs of a backend; None: it does.

        A launcher that has an engine start the same command on every rank gives `adapter.why_not_externally_started()`
        where there are several: a rank that is alone starts what its backend has by itself.

        Args:
            adapter: Of the backend.
            processes: As many as its allocation has slots; 1 where it has no allocation.
        """
        return None

    def without(self, host: str) -> Mapping[str, Any]:
        """The options that change, for a start on the other hosts alone.

        Args:
            host: One that was lost, as it calls itself.

        Raises:
            PlanError: It cannot be left out.
        """
        raise PlanError(f"launcher {self.name!r} cannot leave out a host that was lost: {host}.")

    @abstractmethod
    def launch(
        self,
        job: Job,
        directory: Path,
        *,
        on_event: OnEvent,
        first_port: int | None = None,
    ) -> list[Any]:
        """Runs a job; none of its processes is left when this returns or raises.

        Args:
            job: What every process does; `job.plan.processes` says how many there are.
            directory: Where the run keeps its files.
            on_event: Called here with every event, as it arrives; what of it is kept is not the
                launcher's business.
            first_port: Use this port and those after it; None: any free ones.

        Returns:
            What the job's function returned, by rank, of the processes with a session.

        Raises:
            RunFailedError: A process died, raised, or fell silent.
        """
