"""What a process tells of itself, as it reads it itself: the pipe and the status page of its reporter."""

from __future__ import annotations

import mmap
import os

from isotrain.core.contracts.reporter import (
    PAGE_BYTES,
    Reporter,
    Status,
    accepts_requests,
    read_status,
    request_checkpoint,
)
from isotrain.core.launching.run_directory.pipes import LineReader


class LocalReporter:
    """A reporter, and the other ends of what it writes to.

    Attributes:
        events: A descriptor that becomes readable when it has told something.
        reporter: Of this process.
    """

    def __init__(self, rank: int) -> None:
        self.events, self._writing = os.pipe()
        self._lines = LineReader(self.events)
        self._status = os.memfd_create("isotrain-status")
        os.truncate(self._status, PAGE_BYTES)
        self._page = mmap.mmap(self._status, PAGE_BYTES)
        self.reporter = Reporter(rank, self._writing, self._status)

    def read_lines(self) -> list[bytes] | None:
        """The events that were told, a line each, without waiting."""
        return self._lines.read()

    @property
    def status(self) -> Status:
        """Where this process is."""
        return read_status(self._page)

    def request_checkpoint(self, *, and_end: bool) -> None:
        """Tells the loop that a checkpoint is wanted, and whether the run is to end after that."""
        request_checkpoint(self._page, and_end=and_end)

    @property
    def accepts_requests(self) -> bool:
        """Whether the loop looks for wishes."""
        return accepts_requests(self._page)

    def close(self) -> None:
        """Ends the heartbeat. What is still told is lost."""
        self.reporter.close()
        for descriptor in (self._writing, self.events, self._status):
            os.close(descriptor)
