"""How a weight is cut into parts that lie over replicas; imports no framework."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut: along its longest axis, into parts that differ by a row at most.

    Attributes:
        shape: Of the whole.
        parts: Into how many.
    """

    shape: Sequence[int]
    parts: int

    @functools.cached_property
    def axis(self) -> int:
        """Along which it is cut."""
        return max(range(len(self.shape)), key=self.shape.__getitem__)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Of the parts, along the axis."""
        least, more = divmod(self.shape[self.axis], self.parts)
        return [least + (place < more) for place in range(self.parts)]

    def shape_of(self, place: int) -> list[int]:
        """Of a part."""
        shape = [*self.shape]
        shape[self.axis] = self.lengths[place]
        return shape

    def numbers(self, place: int) -> int:
        """How many are in a part."""
        return math.prod(self.shape_of(place))

    def offset(self, place: int) -> list[int]:
        """Where in the whole a part begins."""
        offset = [0] * len(self.shape)
        offset[self.axis] = sum(self.lengths[:place])
        return offset


def sizes_of(cuts: Sequence[Cut]) -> list[int]:
    """How many numbers each replica has of some tensors.

    Args:
        cuts: Of the tensors, all into as many parts.
    """
    return [sum(cut.numbers(place) for cut in cuts) for place in range(cuts[0].parts)]
