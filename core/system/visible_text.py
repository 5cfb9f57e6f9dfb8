"""Text from anywhere, for a terminal."""

from __future__ import annotations

import re

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
