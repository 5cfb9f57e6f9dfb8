"""Standard streams whose lines go out whole."""

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
    """Lets standard streams that this program was started without read and write nothing.

    A file that is opened later would get the number of one, and whatever is printed to it.
    """
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def write_every_character() -> None:
    """Lets standard output show what its encoding lacks as `\\u2013`, as standard error does."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and not out.encoding.lower().startswith("utf"):
        out.reconfigure(errors="backslashreplace")


def discard_what_cannot_be_written() -> None:
    """Flushes standard output and error; one that takes no more takes what the interpreter's end flushes."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


PIPE_BYTES = 1 << 20
"""Linux gives anybody so much; a new pipe holds a sixteenth of it."""


def enlarge_pipe(pipe: int | IO[bytes] | IO[str]) -> None:
    """Has a pipe hold 1 MiB, so that who prints goes on for a while though nobody reads.

    Args:
        pipe: Either end; with what is no pipe, or where the user has too many of them, nothing happens.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def escape_controls(text: str) -> str:
    """The text with what no terminal shows written out, such as `\\x1b`: it would be heeded as a command."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text
    )


def visible_output(text: str, *, colours: bool) -> str:
    """What a program has printed, as `escape_controls` has it, and lines that it drew anew below each other.

    Args:
        text: Whole lines.
        colours: Whether its colours stay, for a terminal; they are left out otherwise.
    """
    below = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\x1b" not in below and below.isascii() and below.replace("\n", "").isprintable():
        return below
    pieces = _COLOUR.split(below)
    shown = [part if place % 2 else escape_controls(part) for place, part in enumerate(pieces)]
    return "".join(shown if colours else shown[::2])


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
