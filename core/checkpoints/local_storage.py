"""Checkpoints in a local folder, which survive that the machine stops at any moment."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from isotrain.core.checkpoints.storage import Sink, Storage

_REMOVED = ".removed-"


class LocalStorage(Storage):
    """A folder of this machine's file system; it need not be there yet."""

    readers = max(1, min(4, os.cpu_count() or 1))  # checksums take as long as reading

    def __init__(self, location: str) -> None:
        self.location = location
        self._folder = Path(location).absolute()

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        """Writes beside the file, which takes its place once all of it is on the disk."""
        target = self._folder / path
        _make(target.parent)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                yield _Descriptor(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        _sync_folder(target.parent)

    def replace(self, path: str, content: bytes) -> None:
        """Writes a file as `writing` does."""
        with self.writing(path) as sink:
            sink.write(content)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[IO[bytes]]:
        """Opens a file; what is no file of bytes, such as a pipe, is refused and not waited for."""
        descriptor = os.open(self._folder / path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is no regular file")
            yield stream

    def folders(self, path: str) -> list[str]:
        """Lists folders, and links to folders."""
        return sorted(entry.name for entry in self._entries(path) if entry.is_dir())

    def sizes(self, path: str) -> dict[str, int]:
        """Lists files, and links to files."""
        found = {}
        for entry in self._entries(path):
            with contextlib.suppress(FileNotFoundError):  # renamed or removed just now
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
        return found

    def _entries(self, path: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._folder / path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def discard(self, path: str) -> None:
        """Removes a file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / path)

    def remove(self, path: str, first: str) -> None:
        """Renames the folder, which takes it from every reader and writer at once, and then removes it."""
        removed = self._folder / f"{_REMOVED}{secrets.token_hex(8)}"
        try:
            os.rename(self._folder / path, removed)
        except FileNotFoundError:
            return  # somebody else has removed it
        shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Removes folders that were renamed to be removed."""
        for name in self.folders(""):
            if name.startswith(_REMOVED):
                shutil.rmtree(self._folder / name, ignore_errors=True)


class _Descriptor:
    """Writes to a descriptor, without a buffer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview | bytes, /) -> None:
        """Writes all of it, in as many calls as it takes."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def _make(folder: Path) -> None:
    """Makes a folder, and those that it lies in, and has them on the disk."""
    if folder.is_dir():
        return
    _make(folder.parent)
    with contextlib.suppress(FileExistsError):  # another writer was faster; a file is met later
        os.mkdir(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Has the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
