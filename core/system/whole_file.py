"""Files that a reader never sees half of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


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
