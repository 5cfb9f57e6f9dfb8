"""Protocol of a supervised rank process: on this machine, or at the other end of a rendezvous connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.process import Address, ProcessInfo
from isotrain.core.contracts.reporter import Status


class MonitoredProcess(Protocol):
    """A rank process as the supervisor sees it."""

    @property
    def info(self) -> ProcessInfo:
        """Rank, host and role of the process."""

    @property
    def log(self) -> Path:
        """File on this machine with its output, which may be missing for a rank of another host."""

    @property
    def events(self) -> int:
        """Descriptor that becomes readable when there are new events."""

    @property
    def output(self) -> int | None:
        """Descriptor of rank 0's standard output; None for other ranks."""

    def read_lines(self) -> Sequence[bytes] | None:
        """New events, one JSON line each, without waiting; None at the end."""

    @property
    def status(self) -> Status:
        """Current step and call of the process, or the last known ones."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or its connection is closed."""

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative if a signal ended it; None while it runs, or if unknown (another host)."""

    @property
    def is_stopped(self) -> bool:
        """Whether it is known to be suspended by a signal (SIGSTOP)."""

    @property
    def activity(self) -> float:
        """Activity in seconds, see `process_activity.activity`."""

    @property
    def waits(self) -> Mapping[int, float]:
        """Seconds that each thread was runnable without a core, by thread id; empty if unknown."""

    def request_stacks(self) -> None:
        """Has it write the stacks of its threads to its log."""

    def end(self) -> None:
        """Kills it, and its process group if it is on this machine."""


class MemberProcess(MonitoredProcess, Protocol):
    """A process of an elastic run, which is told of the process groups that it is a member of."""

    @property
    def address(self) -> Address:
        """Address of its host, and the port there that is reserved for it."""

    def acknowledge(self, first: int) -> None:
        """Tells it the first step in the newest `Steps` that was received from rank 0."""

    def request_regroup(self) -> None:
        """Requests that it leaves its process group before its next step: a process joins."""

    def void_group(self, generation: int) -> None:
        """Tells it that its process group of a generation has lost a member."""

    def publish_membership(self, membership: Membership) -> None:
        """Tells it which process group it is to join."""
