"""File helpers: atomic writes, folders, URLs, and whether a path is on a network file system."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from isotrain.core.errors import PlanError

_MOUNT_TABLE = Path("/proc/self/mountinfo")
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs"),
        *("glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "fuse.glusterfs", "fuse.ceph"),
        *("fuse.juicefs", "fuse.seaweedfs", "fuse.sshfs"),
    }
)


def is_shared(path: Path) -> bool:
    """Whether a path is on a network file system, which several machines share. It need not exist yet."""
    try:
        table = _MOUNT_TABLE.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    return file_system_type(path.resolve(), table) in _NETWORK_FILE_SYSTEMS


def file_system_type(path: Path, table: str) -> str:
    """The type of the file system that a path is on, such as `ext4`; empty if unknown.

    Args:
        path: Absolute path without symbolic links.
        table: Content of /proc/self/mountinfo; of several mounts on one mount point the last counts.
    """
    depth, type_name = 0, ""
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        mount_point = Path(_unescaped(left.split(" ")[4]))
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= depth:
            depth, type_name = len(mount_point.parts), right.split(" ")[0]
    return type_name


def _unescaped(text: str) -> str:
    """Text of mountinfo with its octal escapes resolved."""
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escape, character)
    return text


def make_folder(folder: Path, what: str) -> Path:
    """Creates a folder and its parents, if missing, and returns it.

    Raises:
        PlanError: It cannot be made; the message calls it `what`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{what} cannot be made: {error}.") from error
    return folder


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Context that, if its body raises, removes a folder and those parents that did not exist before.

    A folder that is not empty stays.
    """
    path = (folder, *folder.parents)
    missing = list(itertools.takewhile(lambda each: not each.exists(), path))
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in missing:
                each.rmdir()
        raise


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(location: str) -> bool:
    """Whether a location is a URL, such as `s3://bucket/folder`."""
    return _URL.match(location) is not None


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside `target`, which is renamed to `target` when the body has succeeded.

    Raises:
        OSError: It cannot be written; `target` is unchanged, as after any other exception.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def atomic_write(target: Path, content: str | bytes) -> None:
    """Writes bytes or UTF-8 text atomically: a reader sees the old content or the new one.

    Raises:
        OSError: It cannot be written; `target` is unchanged.
    """
    with atomic_file(target) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def rewrite_lines(target: Path, replace_line: Callable[[bytes], bytes | None]) -> None:
    """Rewrites a file line by line, atomically; lines that map to None are dropped.

    So is a last line without a newline: its writer was killed, or the disk was full.

    Raises:
        OSError: It cannot be read or written; `target` is unchanged.
    """
    with target.open("rb") as lines, atomic_file(target) as stream:
        for line in lines:
            if line.endswith(b"\n") and (replacement := replace_line(line)) is not None:
                stream.write(replacement)
