"""A reporter that its own process reads: the pipe of its events and its status page."""

from __future__ import annotations

import mmap
import os

from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.reporter import (
    PAGE_BYTES,
    Reporter,
    Status,
    accepts_requests,
    acknowledge,
    publish_membership,
    read_status,
    request_checkpoint,
    request_regroup,
    request_stop,
    void_group,
)
from isotrain.core.launching.run_directory.pipes import LineReader


class LocalReporter:
    """A reporter with the reading ends of its pipe and status page.

    Attributes:
        events: File descriptor that is readable when there are events.
        reporter: Reporter of this process.
    """

    def __init__(self, rank: int) -> None:
        self.events, self._writing = os.pipe()
        self._lines = LineReader(self.events)
        self._status = os.memfd_create("isotrain-status")
        os.truncate(self._status, PAGE_BYTES)
        self._page = mmap.mmap(self._status, PAGE_BYTES)
        self.reporter = Reporter(rank, self._writing, self._status)

    def read_lines(self) -> list[bytes] | None:
        """The new events, one line each, without waiting."""
        return self._lines.read()

    @property
    def status(self) -> Status:
        """Step and current call of this process."""
        return read_status(self._page)

    def request_checkpoint(self, *, and_end: bool) -> None:
        """Requests a checkpoint from the training loop, and with `and_end` the end of the run after it."""
        request_checkpoint(self._page, and_end=and_end)

    def request_stop(self) -> None:
        """Requests that training ends early."""
        request_stop(self._page)

    def acknowledge(self, first: int) -> None:
        """Says the first step in the newest `Steps` that was received from rank 0."""
        acknowledge(self._page, first)

    def request_regroup(self) -> None:
        """Requests that this process leaves its process group before its next step."""
        request_regroup(self._page)

    def void_group(self, generation: int) -> None:
        """Says that the process group of a generation has lost a member."""
        void_group(self._page, generation)

    def publish_membership(self, membership: Membership) -> None:
        """Says which process group this process is to join."""
        publish_membership(self._page, membership.generation, membership.to_bytes())

    @property
    def accepts_requests(self) -> bool:
        """Whether the training loop looks for requests."""
        return accepts_requests(self._page)

    def close(self) -> None:
        """Stops the heartbeat, and drops unread events."""
        self.reporter.close()
        for descriptor in (self._writing, self.events, self._status):
            os.close(descriptor)
