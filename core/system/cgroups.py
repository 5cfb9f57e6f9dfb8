"""Memory limits of Linux control groups, which containers and schedulers set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class GroupMemory:
    """Memory limit of a control group.

    Attributes:
        nbytes: Limit in bytes, of all processes of the group together.
        file: File with the limit.
    """

    nbytes: int
    file: Path


def memory_limit(root: Path = Path("/")) -> GroupMemory | None:
    """The smallest memory limit of this process's control group and those above it; None without one.

    Version 2 is read (`memory.max`), and version 1 (`memory.limit_in_bytes`), where no limit is a number
    beyond any memory.

    Args:
        root: Folder with `proc/self/cgroup` and `sys/fs/cgroup`.
    """
    limits: list[GroupMemory] = []
    for file in _limit_files(root):
        with contextlib.suppress(OSError, ValueError):  # missing, or the word max
            limits.append(GroupMemory(int(file.read_text(encoding="ascii")), file))
    return min(limits, key=lambda limit: limit.nbytes, default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """Paths of the files that may have limits, from this process's group up; of both versions."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (
            (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        )
        # a container sees its own group at the top, whatever the path of it
        inner = PurePosixPath(group.lstrip("/"))
        yield from (top / folder / name for folder in (inner, *inner.parents))
