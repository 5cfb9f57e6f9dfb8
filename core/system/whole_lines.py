"""Standard streams whose lines go out whole."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def line_buffered() -> Iterator[None]:
    """Within it, each line of standard output and error goes out at once when it ends, and in one piece.

    Also where PYTHONUNBUFFERED is set, by which the pieces of a line would go out one by one: what several
    streams write to one log stands line by line.
    """
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    before = [(stream, stream.line_buffering, stream.write_through) for stream in streams]
    for stream in streams:
        stream.reconfigure(line_buffering=True, write_through=False)
    try:
        yield
    finally:
        for stream, by_line, at_once in before:
            stream.reconfigure(line_buffering=by_line, write_through=at_once)
