"""Folders by which the processes of an elastic run hand over their state: in memory, or on disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from isotrain.core.errors import CheckpointError, RunFailedError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "isotrain-elastic-"
_MARGIN = 1 << 16
"""Bytes of the lists of files, and of pages that are not full, for each process that writes."""


class HandoverFolders:
    """The folder of a run's newest process group, and that of the group before, which may still be read.

    A folder is locked as long as this process lives. Those that killed processes have left are removed.
    """

    def __init__(self) -> None:
        """Removes what killed runs have left; makes no folder yet."""
        self._parents = [p for p in (SHARED_MEMORY, Path(tempfile.gettempdir())) if p.is_dir()]
        self._folders: list[_LockedFolder] = []
        for parent in self._parents:
            _sweep(parent)

    def take(self, state_bytes: int, writers: int) -> str:
        """Makes an empty folder for a state; removes that of the group before the last.

        Args:
            state_bytes: Size of all that the processes write, in bytes.
            writers: Number of processes that write.

        Raises:
            RunFailedError: The state fits nowhere.
        """
        return self.fill(state_bytes, writers, lambda folder: None)

    def fill(self, state_bytes: int, writers: int, write: Callable[[str], None]) -> str:
        """`take`, and has the state written; others may take the room that there was, so where it is full
        by then, the state is written elsewhere.

        Args:
            state_bytes: Size of all that is written, in bytes.
            writers: Number of parts that are written.
            write: Writes all of them into a folder.

        Raises:
            RunFailedError: The state fits nowhere.
            CheckpointError: It cannot be written, for another reason than a lack of room.
        """
        while len(self._folders) > 1:
            self._folders.pop(0).remove()
        needed = _needed(state_bytes, writers)
        found: list[str] = []
        for parent in self._parents:
            free = free_bytes(parent)
            found.append(f"{parent} has {free:,} free")
            if free < needed:
                continue
            try:
                folder = _LockedFolder(parent)
            except OSError as error:
                found[-1] += f", but {error.strerror}"
                continue
            self._folders.append(folder)
            try:
                write(str(folder.path))
            except CheckpointError as error:
                if not _is_full(error):
                    raise
                found[-1] += ", but was full before all was written"
                self._folders.remove(folder)
                folder.remove()
                continue
            return str(folder.path)
        raise RunFailedError(_shortage(needed, found))

    def shortage(self, state_bytes: int, writers: int) -> str | None:
        """Reason why a state fits nowhere now; None where it fits. The arguments are those of `take`."""
        needed = _needed(state_bytes, writers)
        free = {parent: free_bytes(parent) for parent in self._parents}
        if max(free.values(), default=0) >= needed:
            return None
        return _shortage(needed, [f"{parent} has {each:,} free" for parent, each in free.items()])

    def close(self) -> None:
        """Removes all folders."""
        for folder in self._folders:
            folder.remove()
        self._folders.clear()


def _is_full(error: CheckpointError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _needed(state_bytes: int, writers: int) -> int:
    return state_bytes + writers * _MARGIN


def _shortage(needed: int, found: Sequence[str]) -> str:
    return (
        f"elastic: the state takes {needed:,} bytes to hand over, and {'; '.join(found)}. Make room, or"
        " let TMPDIR name a folder that has it, and that can be locked (flock)."
    )


class _LockedFolder:
    """A new folder with a lock, by which others see that its owner lives.

    Attributes:
        path: The folder.
    """

    def __init__(self, parent: Path) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another run has swept it
                continue
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            except OSError:
                self.remove()
                raise
            if self.path.is_dir():  # it was not swept before it was locked
                return
            os.close(self._descriptor)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _sweep(parent: Path) -> None:
    """Removes folders whose owners are gone; those of other users stay."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def free_bytes(parent: Path) -> int:
    """Bytes that this user may still write in a folder."""
    status = os.statvfs(parent)
    return status.f_bavail * status.f_frsize
