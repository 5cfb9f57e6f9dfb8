"""Transfers run files from rank 0's host to the launching host, in parts, inside the event stream."""

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


def launcher_sees_folder(folder: Path, line_prefix: str) -> bool:
    """Whether the launching process sees this run directory on a shared file system.

    Args:
        folder: Rank 0's run directory.
        line_prefix: Prefix of the run's lines; the launching process creates a file of that name beside it.
    """
    return (folder.parent / line_prefix).is_file()  # the folder itself may have that name


def return_files(folder: Path, send: OnPlainEvent) -> None:
    """Sends every file of a run that the launching process does not write itself.

    Args:
        folder: Rank 0's run directory.
        send: Called first with an empty part for every file, then with all parts of each file in turn.
    """
    files = sorted(filter(Path.is_file, folder.iterdir() if folder.is_dir() else ()))
    paths = [path for path in files if is_returned_file(path.name)]
    for (
        path
    ) in paths:  # all names first, so that the receiver can report a file whose parts are lost
        send(FilePart(name=path.name, begin=0, size=path.stat().st_size, data="").to_dict())
    for path in paths:
        for part in _parts(path):
            send(part.to_dict())


def is_returned_file(name: str) -> bool:
    """Whether rank 0 sends a file of this name: no log, and none that the launching process writes."""
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
    """Assembles files from their parts, and renames each to its name once it is complete."""

    def __init__(self, folder: Path) -> None:
        """Starts without files.

        Args:
            folder: Target folder; a file of the same name is replaced.
        """
        self._folder = folder
        self._received_bytes: dict[str, int] = {}
        """Bytes received of each incomplete file, by name."""

    def take(self, part: FilePart) -> None:
        """Appends a part to its file; ignores it if an earlier part of the file was lost."""
        if not is_returned_file(part.name) or part.begin != self._received_bytes.setdefault(
            part.name, 0
        ):
            return
        try:
            content = base64.b64decode(part.data, validate=True)
        except binascii.Error:
            return
        partial = self._partial(part.name)
        with partial.open("ab" if part.begin else "wb") as stream:
            stream.write(content)
        self._received_bytes[part.name] = part.begin + len(content)
        if self._received_bytes[part.name] >= part.size:
            del self._received_bytes[part.name]
            partial.replace(self._folder / part.name)

    def close(self, warn: Callable[[str], object]) -> None:
        """Removes incomplete files.

        Args:
            warn: Called with a message for each of them.
        """
        for name, count in self._received_bytes.items():
            self._partial(name).unlink(missing_ok=True)
            warn(f"{name} did not arrive: {count} bytes of it came from the host of rank 0")

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}.{os.getpid()}.partial"
