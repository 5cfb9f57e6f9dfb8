"""Storage interface for the files of checkpoints, local or behind a URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import IO, Protocol


class Sink(Protocol):
    """A writable stream of bytes."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Writes all of `data`."""


class Storage(ABC):
    """A folder with subfolders and files, addressed by relative paths with `/`.

    All operations raise `OSError` on failure; `FileNotFoundError` for a missing file.

    Attributes:
        location: Path or URL of the folder, as the user writes it.
        readers: Number of threads that read from it at once with a gain.
    """

    location: str
    readers: int = 1

    def where(self, path: str) -> str:
        """Full path or URL of a file or folder, for messages."""
        return f"{self.location.rstrip('/')}/{path}" if path else self.location

    @abstractmethod
    def writing(self, path: str) -> AbstractContextManager[Sink]:
        """Opens a file for writing from its start; creates its parent folders.

        After the block the file is complete and durable. After an exception in the block a local file is
        unchanged; a remote one may be partly written.
        """

    @abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Writes a file atomically: a reader sees the old content, or all of `content`."""

    @abstractmethod
    def reading(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a file for reading, seekable."""

    @abstractmethod
    def folders(self, path: str) -> list[str]:
        """Names of the subfolders of a folder, sorted; empty if it does not exist."""

    @abstractmethod
    def sizes(self, path: str) -> dict[str, int]:
        """Sizes of the files in a folder in bytes, by name; empty if it does not exist."""

    @abstractmethod
    def discard(self, path: str) -> None:
        """Removes a file if it exists."""

    @abstractmethod
    def remove(self, path: str, first: str) -> None:
        """Removes a folder with its content; the file `first` (a manifest) disappears first for readers."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Removes the leftovers of interrupted removals."""
