"""Files that a reader never sees half of."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from isotrain.core.errors import PlanError

_TABLE = Path("/proc/self/mountinfo")
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs"),
        *("glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "fuse.glusterfs", "fuse.ceph"),
        *("fuse.juicefs", "fuse.seaweedfs", "fuse.sshfs"),
    }
)


def is_shared(path: Path) -> bool:
    """Whether a path, which need not be there yet, is on a file system that several machines have."""
    try:
        table = _TABLE.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    return kind_of(path.resolve(), table) in _SHARED


def kind_of(path: Path, table: str) -> str:
    """The kind of file system that an absolute path is on.

    Args:
        path: Without links.
        table: As in /proc/self/mountinfo; of several file systems at one place the last counts.
    """
    depth, found = 0, ""
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        where = Path(_unescaped(left.split(" ")[4]))
        if path.is_relative_to(where) and len(where.parts) >= depth:
            depth, found = len(where.parts), right.split(" ")[0]
    return found


def _unescaped(text: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text


def make_folder(folder: Path, what: str) -> Path:
    """Makes a folder where there is none yet.

    Args:
        folder: To be there.
        what: Begins the message of the error: the folder as the person knows it.

    Raises:
        PlanError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{what} cannot be made: {error}.") from error
    return folder


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Should its body fail, takes a folder, and those above it, away again where there was none.

    One that something was put into meanwhile stays.
    """
    way = (folder, *folder.parents)
    missing = list(itertools.takewhile(lambda each: not each.exists(), way))
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in missing:
                each.rmdir()
        raise


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(location: str) -> bool:
    """Whether a location is a URL."""
    return _URL.match(location) is not None


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[IO[bytes]]:
    """Opens a file beside `target`, which takes that place once all of it is written.

    Args:
        target: Replaced if it is there.

    Raises:
        OSError: It cannot be written; `target` is as it was, as after any other exception.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def atomic_write(target: Path, content: str | bytes) -> None:
    """Writes a file that a reader sees as it was before, or whole.

    Args:
        target: Replaced if it is there.
        content: Bytes, or text for UTF-8.

    Raises:
        OSError: It cannot be written; `target` is as it was.
    """
    with atomic_file(target) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def rewrite_lines(target: Path, kept: Callable[[bytes], bytes | None]) -> None:
    """Writes a file of lines anew, one at a time, however long it is.

    A last line that was never finished is left out: whoever wrote it was killed, or had no room.

    Args:
        target: It must be there.
        kept: Is given a line with its end; returns what stands in its place, or None for nothing.

    Raises:
        OSError: It cannot be read or written; `target` is as it was.
    """
    with target.open("rb") as lines, atomic_file(target) as stream:
        for line in lines:
            if line.endswith(b"\n") and (found := kept(line)) is not None:
                stream.write(found)
