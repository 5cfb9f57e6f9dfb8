"""A process of a run, as whoever watches it sees it: on this machine, or at the other end of a channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from isotrain.core.contracts.process import Peer
from isotrain.core.contracts.reporter import Status


class MonitoredProcess(Protocol):
    """What a supervisor reads of a process, and asks of it."""

    @property
    def peer(self) -> Peer:
        """Who it is."""

    @property
    def log(self) -> Path:
        """The file with its output, as far as that is here."""

    @property
    def events(self) -> int:
        """A descriptor that becomes readable when it has told something."""

    @property
    def output(self) -> int | None:
        """A descriptor to read rank 0's standard output from; None for the others."""

    def read_lines(self) -> Sequence[bytes] | None:
        """The events that it has told, a line each, without waiting; None when no more will come."""

    @property
    def status(self) -> Status:
        """Where it is, or was when it was last known."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or cut itself off."""

    @property
    def exit_code(self) -> int | None:
        """Negative when a signal ended it; None while it runs, and where nobody here can know."""

    @property
    def is_stopped(self) -> bool:
        """Whether it is known that a signal (SIGSTOP) has suspended it."""

    @property
    def activity(self) -> float:
        """Grows with what it does; see `activity`."""

    @property
    def waits(self) -> Mapping[int, float]:
        """Seconds in which each of its threads was ready, and had no processor; none if nobody knows."""

    def request_stacks(self) -> None:
        """Makes it write where each of its threads is to its log."""

    def end(self) -> None:
        """Ends it for sure, and all of its process group."""
