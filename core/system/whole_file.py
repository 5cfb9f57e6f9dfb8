"""Files that a reader never sees half of."""

from __future__ import annotations

from pathlib import Path


def write_whole(target: Path, content: str | bytes) -> None:
    """Writes a file beside `target`, then lets it take that place.

    Args:
        target: Replaced if it is there.
        content: Bytes, or text for UTF-8.

    Raises:
        OSError: It cannot be written; `target` is as it was.
    """
    partial = target.with_name(f"{target.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(target)
