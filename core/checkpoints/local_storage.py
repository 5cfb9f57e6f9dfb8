"""Local storage of checkpoints, durable (fsync) and atomic (rename) also if the machine stops."""

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

_REMOVED_PREFIX = ".removed-"


class LocalStorage(Storage):
    """A folder of a mounted file system; it need not exist yet."""

    readers = max(1, min(4, os.cpu_count() or 1))  # checksums take as long as reading

    def __init__(self, location: str) -> None:
        self.location = location
        self._folder = Path(location).absolute()

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        """Writes a temporary file, syncs it to disk and renames it to the target."""
        target = self._folder / path
        _make_folders(target.parent)
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
        """Writes a file atomically, as `writing` does."""
        with self.writing(path) as sink:
            sink.write(content)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[IO[bytes]]:
        """Opens a file without blocking; refuses anything but regular files, such as a pipe."""
        descriptor = os.open(self._folder / path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is no regular file")
            yield stream

    def folders(self, path: str) -> list[str]:
        """Lists folders and links to folders."""
        return sorted(entry.name for entry in self._entries(path) if entry.is_dir())

    def sizes(self, path: str) -> dict[str, int]:
        """Lists files and links to files."""
        sizes = {}
        for entry in self._entries(path):
            with contextlib.suppress(FileNotFoundError):  # renamed or removed just now
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

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
        """Renames the folder, so that it disappears for all readers and writers at once, then removes it."""
        removed = self._folder / f"{_REMOVED_PREFIX}{secrets.token_hex(8)}"
        try:
            os.rename(self._folder / path, removed)
        except FileNotFoundError:
            return  # another process has removed it
        shutil.rmtree(removed, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Removes folders that were renamed for removal."""
        for name in self.folders(""):
            if name.startswith(_REMOVED_PREFIX):
                shutil.rmtree(self._folder / name, ignore_errors=True)


class _Descriptor:
    """An unbuffered sink on a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview | bytes, /) -> None:
        """Writes all of `data`, in as many system calls as it takes."""
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(self._descriptor, remaining) :]


def _make_folders(folder: Path) -> None:
    """Creates a folder with its parents, and syncs their directory entries to disk."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):  # another writer was faster; a file fails later
        os.mkdir(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Syncs the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
