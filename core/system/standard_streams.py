"""Standard streams: closed, full or unencodable ones, line buffering, text that is safe for a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import IO


def replace_closed_streams() -> None:
    """Opens `/dev/null` in place of standard streams that this program was started without.

    Otherwise a file that is opened later would get the descriptor of one, and everything printed to it.
    """
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def write_every_character() -> None:
    """Has standard output escape characters that its encoding lacks (`\\u2013`), as standard error does."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and not out.encoding.lower().startswith("utf"):
        out.reconfigure(errors="backslashreplace")


def discard_what_cannot_be_written() -> None:
    """Flushes standard output and error; redirects one that cannot be written to `/dev/null`.

    Otherwise the flush at the interpreter's end would fail.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)


PIPE_BYTES = 1 << 20
"""Largest pipe that Linux allows unprivileged users by default; a new pipe holds a sixteenth of it."""


def enlarge_pipe(pipe: int | IO[bytes] | IO[str]) -> None:
    """Enlarges the buffer of a pipe to 1 MiB, so that its writer is not blocked by a pause of its reader.

    Nothing happens if it is no pipe, or if the user has too many large pipes.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def can_redraw(stream: IO[str]) -> bool:
    """Whether a stream is a terminal in which a line can be drawn anew."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def has_colours(stream: IO[str]) -> bool:
    """Whether colour codes may be written to a stream: FORCE_COLOR and NO_COLOR decide, else the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return can_redraw(stream)


_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def escape_controls(text: str) -> str:
    """Text with control characters escaped (`\\x1b`), which a terminal would obey as commands."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text
    )


def visible_output(text: str, *, colours: bool) -> str:
    """Whole lines with control characters escaped (colour codes stay with `colours`), returns as newlines."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\x1b" not in lines and lines.isascii() and lines.replace("\n", "").isprintable():
        return lines
    parts = _COLOUR.split(lines)  # text and colour codes in turn
    escaped = [part if index % 2 else escape_controls(part) for index, part in enumerate(parts)]
    return "".join(escaped if colours else escaped[::2])


@contextlib.contextmanager
def line_buffered() -> Iterator[None]:
    """Context in which standard output and error write each line at once and in one piece.

    With PYTHONUNBUFFERED the pieces of a line would be written one by one, and lines of several streams would
    mix in one log.
    """
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    former_modes = [(stream, stream.line_buffering, stream.write_through) for stream in streams]
    for stream in streams:
        stream.reconfigure(line_buffering=True, write_through=False)
    try:
        yield
    finally:
        for stream, by_line, at_once in former_modes:
            stream.reconfigure(line_buffering=by_line, write_through=at_once)
