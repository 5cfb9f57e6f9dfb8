"""Remote storage of checkpoints, such as a bucket, through fsspec."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO, Any

from isotrain.core.checkpoints.storage import Sink, Storage
from isotrain.core.errors import CheckpointError


class FsspecStorage(Storage):
    """A folder of any fsspec filesystem. Needs no renaming, which object stores lack."""

    def __init__(self, location: str) -> None:
        import fsspec.core  # only for URLs: it takes time

        self.location = location
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(location)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{location} cannot be opened: {error}") from error

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        """Writes the file in place; creates folders if the filesystem has folders."""
        with _as_os_errors(), self._open_for_writing(path) as stream:
            yield stream

    def _open_for_writing(self, path: str) -> IO[bytes]:
        try:
            stream: IO[bytes] = self._filesystem.open(self._url(path), "wb")
        except FileNotFoundError:  # no object store, which has no folders and would make a bucket
            self._filesystem.makedirs(self._url(path.rpartition("/")[0]), exist_ok=True)
            stream = self._filesystem.open(self._url(path), "wb")
        return stream

    def replace(self, path: str, content: bytes) -> None:
        """Puts the file in one request if its folder exists or none is needed."""
        with _as_os_errors():
            try:
                self._filesystem.pipe_file(self._url(path), content)
            except FileNotFoundError:
                with self.writing(path) as sink:
                    sink.write(content)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[IO[bytes]]:
        """Opens a file, of which only the requested ranges are fetched."""
        with _as_os_errors(), self._filesystem.open(self._url(path), "rb") as stream:
            yield stream

    def folders(self, path: str) -> list[str]:
        """Lists folders, in object stores the common prefixes that end with `/`."""
        return sorted(_name(each) for each in self._entries(path) if each["type"] == "directory")

    def sizes(self, path: str) -> dict[str, int]:
        """Lists files, without fsspec's cache of listings."""
        return {
            _name(each): int(each["size"])
            for each in self._entries(path)
            if each["type"] == "file" and each["name"].strip("/") != self._url(path).strip("/")
        }

    def _entries(self, path: str) -> list[dict[str, Any]]:
        with _as_os_errors():
            self._filesystem.invalidate_cache()
            try:
                entries: list[dict[str, Any]] = self._filesystem.ls(self._url(path), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return entries

    def discard(self, path: str) -> None:
        """Removes a file, or a folder with its content."""
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._url(path), recursive=True)

    def remove(self, path: str, first: str) -> None:
        """Removes `first`, then the other files."""
        self.discard(f"{path}/{first}")
        self.discard(path)

    def remove_leftovers(self) -> None:
        """Does nothing: an interrupted removal leaves a checkpoint without manifest, which is pruned."""

    def _url(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Converts filesystem-specific errors, such as of network or credentials, to `OSError`."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
