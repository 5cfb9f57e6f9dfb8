"""What texts on the command line stand for; each is a `type` of argparse."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _whole_number(text, 1, None)


def several(text: str) -> int:
    """A whole number of at least 2."""
    return _whole_number(text, 2, None)


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1, between commas."""
    return [count(part) for part in listed(text)]


def listed(text: str) -> list[str]:
    """Texts between commas."""
    return [part.strip() for part in text.split(",")]


def port(text: str) -> int:
    """A port."""
    return _whole_number(text, 1, 65535)


def _whole_number(text: str, least: int, most: int | None) -> int:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    value = int(text) if text.isdecimal() else least - 1
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, received {text!r}")
    return value
