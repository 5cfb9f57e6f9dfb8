"""A run's files on their way from the host of rank 0 to who has had the run started: as events with parts."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from isotrain.core.contracts.events import FilePart, OnPlainEvent
from isotrain.core.launching.run_directory.run_directory import KEPT_BY_LAUNCHER, rank_log

_PART_BYTES = 1 << 15
_NAME = re.compile(r"\w[\w.-]*")


def launcher_sees_folder(folder: Path, mark: str) -> bool:
    """Whether who follows a run sees its folder: a file beside it has the name of the mark."""
    return (folder.parent / mark).is_file()  # the folder itself may have that name


def return_files(folder: Path, say: OnPlainEvent) -> None:
    """Tells of every file of a run that its launcher does not keep itself.

    Args:
        folder: Where rank 0 has kept them.
        say: Is told of every file, as of a part without bytes, and then of every part, one after the other.
    """
    found = sorted(filter(Path.is_file, folder.iterdir() if folder.is_dir() else ()))
    paths = [path for path in found if is_returned_file(path.name)]
    for path in paths:  # all names first: who waits then knows of a file though its parts be lost
        say(FilePart(name=path.name, begin=0, size=path.stat().st_size, data="").to_dict())
    for path in paths:
        for part in _parts(path):
            say(part.to_dict())


def is_returned_file(name: str) -> bool:
    """Whether a file of rank 0's is one that its launcher has not written by what it was told."""
    is_log = rank_log(Path(), 0).suffix == Path(name).suffix
    return name not in KEPT_BY_LAUNCHER and not is_log and _NAME.fullmatch(name) is not None


def _parts(path: Path) -> Iterator[FilePart]:
    size, begin = path.stat().st_size, 0
    with path.open("rb") as stream:
        while True:
            chunk = stream.read(_PART_BYTES)
            text = base64.b64encode(chunk).decode()
            yield FilePart(name=path.name, begin=begin, size=size, data=text)
            begin += len(chunk)
            if begin >= size or not chunk:
                return


class FileReceiver:
    """Files that come part by part; each is in its place once it is whole."""

    def __init__(self, folder: Path) -> None:
        """Waits for the first.

        Args:
            folder: Where they go; what has the name of one is replaced.
        """
        self._folder = folder
        self._there: dict[str, int] = {}
        """Bytes by name, of those that are not whole."""

    def take(self, part: FilePart) -> None:
        """Keeps a part; one that does not follow on that before it is of a file that has lost another."""
        if not is_returned_file(part.name) or part.begin != self._there.setdefault(part.name, 0):
            return
        try:
            content = base64.b64decode(part.data, validate=True)
        except binascii.Error:
            return
        partial = self._partial(part.name)
        with partial.open("ab" if part.begin else "wb") as stream:
            stream.write(content)
        self._there[part.name] = part.begin + len(content)
        if self._there[part.name] >= part.size:
            del self._there[part.name]
            partial.replace(self._folder / part.name)

    def close(self, warn: Callable[[str], None]) -> None:
        """Removes those that are not whole, and says which.

        Args:
            warn: Is told of each.
        """
        for name, count in self._there.items():
            self._partial(name).unlink(missing_ok=True)
            warn(f"{name} did not arrive: {count} bytes of it came from the host of rank 0")

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}.{os.getpid()}.partial"
