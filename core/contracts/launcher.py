"""The contract of a launcher: what starts the processes of a run."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.core.contracts.capabilities import Availability
from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.events import OnEvent
    from isotrain.core.contracts.job import Job


@dataclass(frozen=True)
class HostSlots:
    """What one host gives.

    Attributes:
        slots: Processes that may run there.
        host: Its name; None: the engine chooses it when the run starts.
        devices: Accelerators there; None: nobody tells before the run starts.
    """

    slots: int
    host: str | None = None
    devices: int | None = None


@dataclass(frozen=True)
class Allocation:
    """What all hosts give, in the order of their ranks.

    Attributes:
        host_slots: Of each host.
    """

    host_slots: tuple[HostSlots, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their names; empty where the engine chooses them later."""
        return tuple(share.host for share in self.host_slots if share.host is not None)

    @property
    def slots(self) -> int:
        """Processes in all."""
        return sum(share.slots for share in self.host_slots)

    @property
    def devices(self) -> int | None:
        """Accelerators that every host has at least; None: nobody tells of one of them."""
        told = [share.devices for share in self.host_slots]
        known = [count for count in told if count is not None]
        return min(known) if len(known) == len(told) else None

    @property
    def is_even(self) -> bool:
        """Whether every host gives as many processes as the first."""
        return all(share.slots == self.host_slots[0].slots for share in self.host_slots)


@dataclass(frozen=True)
class RankCommand:
    """What an engine starts on every rank, which finds its place there by itself.

    Attributes:
        name: Of this run and of no other, as engines take it: small letters, digits, hyphens.
        spec: The spec's file here, which other hosts need not see.
        spec_text: What is in it.
        options: Of `isotrain run`, but for the run directory.
        run_directory: Where rank 0 keeps the run's files, on its own host.
        variables: What every rank must find set, as it is here; no secret is among them.
        key: A secret by which the processes of the run know each other.
        follow_options: Options for a run that is followed from here while it goes on.
        fewest_processes: With how few the run may go on; None: with no fewer than it began.
        key_variable: The variable in which they are told the key.
        spec_variable: The one in which they are told the spec.
        key_file_variable: The one that names a file with it, where everybody can read variables.
        key_file: The person's own, where processes look for one that they are not told of.
    """

    name: str
    spec: Path
    spec_text: str
    options: tuple[str, ...]
    run_directory: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    follow_options: tuple[str, ...] = ()
    fewest_processes: int | None = None
    key_variable: ClassVar[str] = "ISOTRAIN_KEY"
    spec_variable: ClassVar[str] = "ISOTRAIN_SPEC"
    key_file_variable: ClassVar[str] = "ISOTRAIN_KEY_FILE"
    key_file: ClassVar[Path] = Path("~/.config/isotrain/key")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The program and its arguments, where hosts have this one's interpreter."""
        where = f"env:{self.spec_variable}"
        return self.on_host(sys.executable, where, str(self.run_directory))

    def on_host(self, python: str, spec: str, run_directory: str) -> tuple[str, ...]:
        """The same where these are elsewhere."""
        run = (python, "-m", "isotrain", "run", spec)
        return (*run, *self.options, *self.follow_options, "--run-dir", run_directory)

    @property
    def secret_variables(self) -> dict[str, str]:
        """Further variables that every rank must find set, and that stand on no command line."""
        spec = json.dumps(json.loads(self.spec_text))
        return {self.key_variable: self.key, self.spec_variable: spec}


@dataclass(frozen=True)
class Submission:
    """What is given to an engine.

    Attributes:
        commands: Programs with their arguments, started here together; all have ended when the run has.
            What rank 0 prints comes out of them.
        variables: What the commands find set besides.
        files: Texts by name, written into the run's folder before.
        key_in_environment: Whether the commands find `ISOTRAIN_KEY` set, for engines that hand variables on
            and show nobody what is in them.
        stdin: What each command reads, such as a secret that must stand on no command line.
        cleanup_commands: Commands that end what the engine has started, where ending `commands` does not,
            or they were killed.
    """

    commands: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    key_in_environment: bool = True
    stdin: str = field(default="", repr=False)
    cleanup_commands: tuple[tuple[str, ...], ...] = ()


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

        A launcher that has an engine start the same command on every rank gives
        `adapter.why_not_externally_started()` where there are several: a rank that is alone starts what its
        backend has by itself.

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
