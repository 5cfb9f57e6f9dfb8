"""Standard streams that are closed, or that take no more."""

from __future__ import annotations

import io
import os
import sys


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
