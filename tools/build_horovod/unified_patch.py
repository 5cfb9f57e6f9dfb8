"""Apply a unified diff exactly: no fuzz, no offsets, no need for a `patch` program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class PatchError(Exception):
    """The patch is malformed or does not fit the files."""


@dataclass(frozen=True)
class Hunk:
    """One change: at line `start` (from 1) of `path`, the lines `old` become `new`."""

    path: str
    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


def parse(text: str) -> list[Hunk]:
    """Read the hunks of a diff with `a/` and `b/` prefixes; text around them is commentary.

    Args:
        text: The diff.

    Returns:
        The hunks in order.

    Raises:
        PatchError: A hunk has no file, or not the number of lines that its header states.
    """
    hunks: list[Hunk] = []
    path = ""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif match := _HUNK.match(line):
            if not path:
                raise PatchError(f"no '+++ b/FILE' line before {line!r}")
            start, old_count, new_count = (int(group or 1) for group in match.groups())
            hunks.append(_read_hunk(lines, path, start, old_count, new_count))
    return hunks


def _read_hunk(lines: Iterator[str], path: str, start: int, old_count: int, new_count: int) -> Hunk:
    old: list[str] = []
    new: list[str] = []
    while len(old) < old_count or len(new) < new_count:
        line = next(lines, None)
        if line is None or line[:1] not in (" ", "-", "+"):
            raise PatchError(f"hunk at line {start} of {path}: expected more lines, got {line!r}")
        if line[0] != "+":
            old.append(line[1:])
        if line[0] != "-":
            new.append(line[1:])
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchError(f"hunk at line {start} of {path} is longer than its header says")
    return Hunk(path, start, tuple(old), tuple(new))


def apply(text: str, root: Path) -> int:
    """Apply a diff to the files under `root`.

    Args:
        text: The diff.
        root: The folder that the paths in the diff are relative to.

    Returns:
        The number of hunks that were applied.

    Raises:
        PatchError: A hunk does not fit its file exactly, or there is none.
    """
    hunks = parse(text)
    if not hunks:
        raise PatchError("the patch contains no hunk")
    for hunk in reversed(hunks):  # from the last line up: the others keep their numbers
        _apply_hunk(hunk, root / hunk.path)
    return len(hunks)


def _apply_hunk(hunk: Hunk, file: Path) -> None:
    if not file.is_file():
        raise PatchError(f"the patch changes {hunk.path}, which is not in the source")
    lines = file.read_text(encoding="utf-8").split("\n")
    first = hunk.start - 1
    last = first + len(hunk.old)
    if tuple(lines[first:last]) != hunk.old:
        raise PatchError(f"the hunk at line {hunk.start} of {hunk.path} does not fit the source")
    lines[first:last] = hunk.new
    file.write_text("\n".join(lines), encoding="utf-8")
