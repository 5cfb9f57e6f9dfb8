"""The calls by which a folder of checkpoints changes the disk, watched, and made to fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CHANGING = ("open", "write", "fsync", "close", "replace", "rename", "mkdir", "unlink", "rmdir")
"""Each call, by its name in `os`."""


class WatchedOs:
    """Stands for the module `os`: tells of each call before and after it.

    Attributes:
        before: Called with the name and the arguments; what it raises, the call raises.
        after: The same, with the result first.
    """

    def __init__(
        self,
        before: Callable[..., None] = lambda *_: None,
        after: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.before = before
        self.after = after

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGING:
            return real

        def call(*args: Any, **options: Any) -> Any:
            self.before(name, *args)
            done = None if name == "fsync" else real(*args, **options)  # which takes long on a disk
            self.after(done, name, *args)
            return done

        return call


class Disk:
    """What of a folder outlasts that the machine stops: what was fsynced, and no more.

    A file has the content that it had when it was fsynced, a folder the names.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, list[tuple[str, int, bool]]] = {}

    def saw(self, done: Any, name: str, *args: Any) -> None:
        """Takes note of a call after it was made."""
        if name == "open" and args[1] & os.O_CREAT:
            self._contents.pop(os.fstat(done).st_ino, None)  # it may be that of a removed one
        elif name == "mkdir":
            self._entries.pop(os.stat(args[0]).st_ino, None)
        elif name == "fsync":
            self._synced(os.fstat(args[0]).st_ino, Path(f"/proc/self/fd/{args[0]}"))

    def _synced(self, inode: int, path: Path) -> None:
        if path.is_dir():
            with os.scandir(path) as entries:
                self._entries[inode] = [(e.name, e.inode(), e.is_dir()) for e in entries]
        else:
            self._contents[inode] = path.read_bytes()

    def after_a_stop(self, target: Path, removals_are_done: bool) -> Path:
        """Makes a folder as it is found when the machine starts again.

        Args:
            target: Made anew.
            removals_are_done: Whether files that were removed are gone, although nobody waited for it.
        """
        shutil.rmtree(target, ignore_errors=True)
        folders = [self._root, *(path for path in self._root.rglob("*") if path.is_dir())]
        names = {path.stat().st_ino: set(os.listdir(path)) for path in folders}
        self._restore(self._root.stat().st_ino, target, names if removals_are_done else None)
        return target

    def _restore(self, inode: int, target: Path, names: Mapping[int, set[str]] | None) -> None:
        target.mkdir()
        for name, each, is_folder in self._entries.get(inode, []):
            if is_folder:
                self._restore(each, target / name, names)
            elif names is None or name in names.get(inode, ()):
                (target / name).write_bytes(self._contents.get(each, b""))
