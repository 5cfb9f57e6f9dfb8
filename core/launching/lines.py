"""Reading a pipe line by line, without waiting."""

from __future__ import annotations

import contextlib
import os


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
