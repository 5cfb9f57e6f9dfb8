"""Files that a reader never sees half of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[IO[bytes]]:
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


def write_whole(target: Path, content: str | bytes) -> None:
    """Writes a file that a reader sees as it was before, or whole.

    Args:
        target: Replaced if it is there.
        content: Bytes, or text for UTF-8.

    Raises:
        OSError: It cannot be written; `target` is as it was.
    """
    with whole_file(target) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
