"""Reading a log while it is written."""

from __future__ import annotations

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
