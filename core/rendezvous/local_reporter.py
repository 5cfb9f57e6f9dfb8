"""A reporter that its own process reads: the pipe of its events and its status page."""

from __future__ import annotations

import os

from isotrain.core.contracts.reporter import Reporter
from isotrain.core.launching.processes.status_page import StatusPage
from isotrain.core.launching.run_directory.pipes import LineReader


class LocalReporter(StatusPage):
    """A reporter with the reading ends of its pipe and status page.

    Attributes:
        events: File descriptor that is readable when there are events.
        reporter: Reporter of this process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.events, self._writing = os.pipe()
        self._lines = LineReader(self.events)
        self.reporter = Reporter(rank, self._writing, self.page_file)

    def read_lines(self) -> list[bytes] | None:
        """The new events, one line each, without waiting."""
        return self._lines.read()

    def close(self) -> None:
        """Stops the heartbeat, and drops unread events."""
        self.reporter.close()
        for descriptor in (self._writing, self.events, self.page_file):
            os.close(descriptor)
