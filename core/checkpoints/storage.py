"""Where the files of checkpoints lie: in a local folder, or behind a URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import IO, Protocol


class Sink(Protocol):
    """What bytes are written to."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Writes all of them."""


class Storage(ABC):
    """A folder with folders and files, by relative paths with `/`.

    What is in the way of an operation is an `OSError`, of which `FileNotFoundError` has its meaning.

    Attributes:
        location: Of the folder, as a person writes it.
        readers: How many threads may read from it at once, and gain by it.
    """

    location: str
    readers: int = 1

    def where(self, path: str) -> str:
        """A file's or a folder's full path or URL, for messages."""
        return f"{self.location.rstrip('/')}/{path}" if path else self.location

    @abstractmethod
    def writing(self, path: str) -> AbstractContextManager[Sink]:
        """Opens a file to be written from its start, and makes the folders that it lies in.

        After the block the file is there, whole and for good. After an exception in it, it is as
        it was in a local folder; elsewhere it may be there in part.
        """

    @abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Writes a file so that a reader sees what was there before, or all of `content`."""

    @abstractmethod
    def reading(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a file to be read, at any place in it."""

    @abstractmethod
    def folders(self, path: str) -> list[str]:
        """The names of the folders in a folder, sorted; none where it is not there."""

    @abstractmethod
    def sizes(self, path: str) -> dict[str, int]:
        """The names of the files in a folder, and the bytes that each has; none where it is not there."""

    @abstractmethod
    def discard(self, path: str) -> None:
        """Removes a file if it is there."""

    @abstractmethod
    def remove(self, path: str, first: str) -> None:
        """Removes a folder and all in it; no reader sees the file `first` in it but not the others."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Removes what removals that were interrupted have left."""
