"""The parts of a tensor-parallel replica, as layers that are cut see them; imports no framework."""

from __future__ import annotations

from typing import Any, Protocol


class Parts(Protocol):
    """The parts of a replica, each in a process, with the collectives of their layers.

    Attributes:
        index: Index of this part.
        degree: Number of parts.
        numbers_of_max: Numbers that `max` sends for each element of its tensor.
    """

    index: int
    degree: int
    numbers_of_max: int

    def copy(self, tensor: Any) -> Any:
        """The tensor, of any shape, equal on all parts; its gradient is the sum of theirs. Collective."""

    def sum(self, tensor: Any) -> Any:
        """Sum of the parts' tensors, of one shape; each gets the gradient of the result. Collective."""

    def max(self, tensor: Any) -> Any:
        """Elementwise maximum of the parts' tensors, of one shape, without gradients. Collective."""


def part_bounds(size: int, parts: Parts) -> tuple[int, int]:
    """Start and length of this process's part of an axis; parts differ by one at most."""
    start, end = (size * index // parts.degree for index in (parts.index, parts.index + 1))
    return start, end - start
