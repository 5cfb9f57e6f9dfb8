"""Text from anywhere, for a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with what no terminal shows written out, such as `\\x1b`: it would be heeded as a command."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text
    )
