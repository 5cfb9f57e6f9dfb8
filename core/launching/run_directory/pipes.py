"""Non-blocking line readers of a pipe and of a growing log file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class LogTail:
    """Reads the complete lines that are appended to a log, which need not exist yet."""

    def __init__(self, path: Path, *, from_start: bool) -> None:
        """Opens nothing yet.

        Args:
            path: Log file.
            from_start: Whether to read from its first line, and not from its present end.
        """
        self._path = path
        self._position = 0 if from_start or not path.exists() else path.stat().st_size
        self._unfinished = b""

    def lines(self) -> list[str]:
        """Complete lines appended since the last call, each with its newline."""
        if not self._path.exists() or self._path.stat().st_size == self._position:
            return []
        with self._path.open("rb") as log:
            log.seek(self._position)
            added = log.read()
        self._position += len(added)
        *lines, self._unfinished = (self._unfinished + added).split(b"\n")
        return [line.decode(errors="replace") + "\n" for line in lines]

    def rest(self) -> list[str]:
        """All remaining lines once the log is complete, including a last line without a newline."""
        lines = self.lines()
        if self._unfinished:
            lines.append(self._unfinished.decode(errors="replace") + "\n")
            self._unfinished = b""
        return lines


class LineReader:
    """Reads complete lines from a pipe, which it sets to non-blocking."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._unread = b""

    def read(self) -> list[bytes] | None:
        """Complete lines received since the last call, without newlines; None at the end of the pipe."""
        chunk = read_available(self._descriptor)
        if chunk is None:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return lines


def read_available(descriptor: int) -> bytes | None:
    """All bytes that can be read without waiting; None at the end of the pipe."""
    content = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 1 << 16):
            content += chunk
        return content or None
    return content
