"""Reading a pipe line by line, without waiting."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class LogTail:
    """What is added to a log, which need not be there yet, in whole lines."""

    def __init__(self, path: Path, *, from_start: bool) -> None:
        """Begins to read.

        Args:
            path: The log.
            from_start: With its first line; otherwise with what comes after its present end.
        """
        self._path = path
        self._position = 0 if from_start or not path.exists() else path.stat().st_size
        self._unfinished = b""

    def lines(self) -> list[str]:
        """The lines that were added since the last call, each with its end."""
        if not self._path.exists() or self._path.stat().st_size == self._position:
            return []
        with self._path.open("rb") as log:
            log.seek(self._position)
            added = log.read()
        self._position += len(added)
        *whole, self._unfinished = (self._unfinished + added).split(b"\n")
        return [line.decode(errors="replace") + "\n" for line in whole]

    def rest(self) -> list[str]:
        """What is left when nothing more will be added: also a last line without an end."""
        lines = self.lines()
        if self._unfinished:
            lines.append(self._unfinished.decode(errors="replace") + "\n")
            self._unfinished = b""
        return lines


class LineReader:
    """What comes out of a pipe, as whole lines."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._unread = b""

    def read(self) -> list[bytes] | None:
        """The lines that have come since the last call; None at the end."""
        chunk = read_available(self._descriptor)
        if chunk is None:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return lines


def read_available(descriptor: int) -> bytes | None:
    """All that can be read without waiting; None at the end."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 1 << 16):
            found += chunk
        return found or None
    return found
