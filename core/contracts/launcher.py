"""The contract of a launcher: starts the processes of a run, here or by a scheduler such as SLURM."""

from __future__ import annotations

import itertools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.core.contracts.backend.capabilities import Availability
from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.adapter import Adapter
    from isotrain.core.contracts.events import OnEvent
    from isotrain.core.contracts.job import Job


@dataclass(frozen=True)
class HostSlots:
    """Process slots of one host of an allocation.

    Attributes:
        slots: Number of processes that may run on the host.
        host: Host name; None if the scheduler chooses the host when the run starts.
        devices: Number of accelerators on the host; None if unknown before the run starts.
    """

    slots: int
    host: str | None = None
    devices: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Hosts and process slots that a scheduler grants a run.

    Attributes:
        host_slots: Slots of each host, in the order of their ranks.
    """

    host_slots: tuple[HostSlots, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts; empty if the scheduler chooses them when the run starts."""
        return tuple(each.host for each in self.host_slots if each.host is not None)

    @property
    def slots(self) -> int:
        """Total number of process slots."""
        return sum(each.slots for each in self.host_slots)

    @property
    def devices(self) -> int | None:
        """Smallest number of accelerators on a host; None if that of any host is unknown."""
        counts = [each.devices for each in self.host_slots]
        known = [count for count in counts if count is not None]
        return min(known) if len(known) == len(counts) else None

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of process slots."""
        return all(each.slots == self.host_slots[0].slots for each in self.host_slots)


@dataclass(frozen=True)
class RankCommand:
    """The command that a scheduler starts on every rank; each rank reads its rank from the environment.

    Attributes:
        name: Unique name of the run that schedulers accept: lower-case letters, digits and hyphens.
        spec: Spec file on this host; other hosts need not have it.
        spec_text: Spec as JSON text.
        options: Options of `isotrain run` or `isotrain join`, without the run directory.
        run_directory: Directory of the run's files on the host of rank 0.
        variables: Environment variables to set on every rank, none of them secret.
        key: Secret by which the processes of the run authenticate each other.
        follow_options: Options for runs whose events are followed from this process.
        fewest_processes: Smallest number of processes the run may continue with; None: it needs them all.
        replacements: Number of processes that may be started in place of lost ones.
        joins: Whether it is `isotrain join`, by which a process joins the run that is in the run directory.
        key_variable: Environment variable that holds the key.
        spec_variable: Environment variable that holds the spec.
        key_file_variable: Environment variable with the path of a key file, for schedulers whose variables
            other users can read.
        key_file: Default path of the user's key file.
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
    replacements: int = 0
    joins: bool = False
    key_variable: ClassVar[str] = "ISOTRAIN_KEY"
    spec_variable: ClassVar[str] = "ISOTRAIN_SPEC"
    key_file_variable: ClassVar[str] = "ISOTRAIN_KEY_FILE"
    key_file: ClassVar[Path] = Path("~/.config/isotrain/key")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Program and arguments for hosts that have this host's interpreter."""
        spec = f"env:{self.spec_variable}"
        return self.on_host(sys.executable, spec, str(self.run_directory))

    def on_host(self, python: str, spec: str, run_directory: str) -> tuple[str, ...]:
        """Program and arguments for hosts with other paths.

        Args:
            python: Path of the interpreter.
            spec: Spec file, or `env:VARIABLE`.
            run_directory: Directory of the run's files.
        """
        if self.joins:
            return (python, "-m", "isotrain", "join", run_directory, *self.options)
        run = (python, "-m", "isotrain", "run", spec)
        return (*run, *self.options, *self.follow_options, "--output", run_directory)

    @property
    def is_elastic(self) -> bool:
        """Whether the other ranks go on when one is lost: the scheduler must not end them."""
        return bool(json.loads(self.spec_text).get("elastic"))

    def joining(self, name: str) -> RankCommand:
        """The command of a process that joins the run in place of a lost one.

        Args:
            name: Name of the process, as schedulers accept it.
        """
        plugins = ("--plugin", "--block-plugin")
        pairs = itertools.pairwise(self.options)
        options = tuple(part for pair in pairs if pair[0] in plugins for part in pair)
        return replace(self, name=name, options=options, joins=True)

    @property
    def secret_variables(self) -> dict[str, str]:
        """Secret environment variables to set on every rank; they must not appear on a command line."""
        spec = json.dumps(json.loads(self.spec_text))
        return {self.key_variable: self.key, self.spec_variable: spec}


@dataclass(frozen=True)
class Submission:
    """Commands that start a run on a scheduler.

    Attributes:
        commands: Programs with arguments, started here at the same time. All end when the run ends, and they
            print the output of rank 0.
        variables: Additional environment variables of the commands.
        files: Name to text of files to write into the run directory first.
        key_in_environment: Whether the commands get `ISOTRAIN_KEY`: for schedulers that pass variables on
            and keep them private.
        stdin: Standard input of each command, such as a secret that must not be on a command line.
        cleanup_commands: Commands that stop the run where stopping `commands` does not, or they were killed.
        submit_with: Name of one of `files` to the program, with arguments, to which a user gives it by hand.
    """

    commands: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    key_in_environment: bool = True
    stdin: str = field(default="", repr=False)
    cleanup_commands: tuple[tuple[str, ...], ...] = ()
    submit_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


LOCAL = "local"
"""Name of the default launcher, which starts processes on this machine."""


@dataclass(frozen=True)
class LauncherChoice:
    """Requested launcher.

    Attributes:
        name: Name under which it is registered.
        options: Keyword arguments of its constructor.
    """

    name: str = LOCAL
    options: Mapping[str, Any] = field(default_factory=dict)


class Launcher(ABC):
    """Starts a run's processes, monitors them and returns their results.

    Its options are the keyword arguments of its constructor.

    Attributes:
        name: Name under which it is registered.
        summary: One line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    def availability(self) -> Availability:
        """Whether it can start runs from this machine; starts nothing. Plans can be made even if not."""
        return Availability(True)

    def allocation(self) -> Allocation | None:
        """Hosts and process slots for the run; None: this machine, with any number of processes.

        Raises:
            PlanError: The options contradict each other or the allocation.
        """
        return None

    def options_for(self, processes: int) -> Mapping[str, Any]:
        """Options, in addition to its own, with which its allocation has this many process slots.

        Args:
            processes: Number of processes that the requested replicas take.

        Returns:
            Options by name; empty where its own options, or the allocation of this process, decide.
        """
        return {}

    def refuses(self, adapter: Adapter, processes: int) -> str | None:
        """Reason why it cannot start runs of a backend; None: it can.

        Launchers that start the same command on every rank return `adapter.why_not_externally_started()` for
        more than one process.

        Args:
            adapter: Adapter of the backend.
            processes: Process slots of the allocation; 1 without an allocation.
        """
        return None

    def why_not_elastic(self) -> str | None:
        """Reason why the other processes of a run do not go on when one is lost; None: they do."""
        return (
            f"launcher {self.name!r} ends all processes when one is lost; the launchers local, slurm and"
            " ray do not"
        )

    def without(self, host: str) -> Mapping[str, Any]:
        """Changed options for a restart that excludes a host.

        Args:
            host: Name of the lost host, as it calls itself.

        Raises:
            PlanError: The launcher cannot exclude it.
        """
        raise PlanError(f"launcher {self.name!r} cannot exclude a lost host: {host}.")

    @abstractmethod
    def launch(
        self,
        job: Job,
        directory: Path,
        *,
        on_event: OnEvent,
        first_port: int | None = None,
    ) -> list[Any]:
        """Runs a job to its end; none of its processes is alive when this returns or raises.

        Args:
            job: Work of every process; `job.plan.processes` lists the processes.
            directory: Run directory.
            on_event: Callback for every event as it arrives, called in this process. If it returns `STOP`,
                training shall end early, which `request_stop` on the status page of rank 0 requests.
            first_port: First of consecutive ports to use; None: any free ports.

        Returns:
            Return values of `job.work` on the processes with a session, by rank.

        Raises:
            RunFailedError: A process died, raised, or sent no heartbeat in time.
        """
