"""A program of the zoo, whatever its framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Program = Callable[[int, int, bool], None]


@dataclass(frozen=True)
class Entry:
    """A program of the zoo.

    Attributes:
        train: The program.
        code: Code of the cause that a comparison must find.
        right: Number of processes of the right one.
        wrong: Number of processes of the one with the fault.
        source: Where such a fault was.
    """

    train: Program
    code: str
    right: int
    wrong: int
    source: str
