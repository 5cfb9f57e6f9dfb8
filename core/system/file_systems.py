"""Whether other machines see a file of this one."""

from __future__ import annotations

from pathlib import Path

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
