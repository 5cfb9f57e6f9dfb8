"""Checkpoints behind a URL, such as in a bucket: through fsspec."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO, Any

from isotrain.core.checkpoints.storage import Sink, Storage
from isotrain.core.errors import CheckpointError


class FsspecStorage(Storage):
    """A folder of any system that fsspec knows. It needs no renaming, which object stores lack."""

    def __init__(self, location: str) -> None:
        import fsspec.core  # only where somebody names a URL

        self.location = location
        try:
            self._system, self._root = fsspec.core.url_to_fs(location)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{location} cannot be opened: {error}") from error

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        """Writes the file in its place; where the system has folders, makes them."""
        with _as_os_errors(), self._to_be_written(path) as stream:
            yield stream

    def _to_be_written(self, path: str) -> IO[bytes]:
        try:
            found: IO[bytes] = self._system.open(self._url(path), "wb")
        except (
            FileNotFoundError
        ):  # object stores, which would make a bucket instead, have no folders to miss
            self._system.makedirs(self._url(path.rpartition("/")[0]), exist_ok=True)
            found = self._system.open(self._url(path), "wb")
        return found

    def replace(self, path: str, content: bytes) -> None:
        """Puts the file in one request where the folder that it lies in is there, or none is needed."""
        with _as_os_errors():
            try:
                self._system.pipe_file(self._url(path), content)
            except FileNotFoundError:
                with self.writing(path) as sink:
                    sink.write(content)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[IO[bytes]]:
        """Opens a file, of which only what is asked for is fetched."""
        with _as_os_errors(), self._system.open(self._url(path), "rb") as stream:
            yield stream

    def folders(self, path: str) -> list[str]:
        """Lists the names before a `/`."""
        return sorted(_name(each) for each in self._entries(path) if each["type"] == "directory")

    def sizes(self, path: str) -> dict[str, int]:
        """Lists the files, as they are now."""
        return {
            _name(each): int(each["size"])
            for each in self._entries(path)
            if each["type"] == "file" and each["name"].strip("/") != self._url(path).strip("/")
        }

    def _entries(self, path: str) -> list[dict[str, Any]]:
        with _as_os_errors():
            self._system.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._system.ls(self._url(path), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return found

    def discard(self, path: str) -> None:
        """Removes a file, or a folder with all in it."""
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._system.rm(self._url(path), recursive=True)

    def remove(self, path: str, first: str) -> None:
        """Removes `first`, and when it is gone the others."""
        self.discard(f"{path}/{first}")
        self.discard(path)

    def remove_leftovers(self) -> None:
        """What an interrupted removal has left is a checkpoint without its manifest."""

    def _url(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Systems raise errors of their own where the network or a key is at fault."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
