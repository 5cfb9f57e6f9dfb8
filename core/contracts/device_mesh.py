"""Where the state of a run lies: its places as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DATA, SHARD, STAGE = "data", "shard", "stage"


@dataclass(frozen=True)
class DeviceMesh:
    """The places of a run as a grid, numbered row by row: neighbours differ along the last axis.

    Along `data`, places hold equal state; along `shard`, each holds a part of it; on both, each place is a
    replica with a slice of its own of every global batch. Along `stage` are the parts of one replica.

    Attributes:
        sizes: Places along each axis, by its name; the axis that varies slowest goes first.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Places along an axis; 1 along one that it does not have."""
        return self.sizes.get(axis, 1)

    @property
    def total_size(self) -> int:
        """In all."""
        return math.prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        """Into how many slices a global batch is cut."""
        return self.size(DATA) * self.size(SHARD)

    def coordinates(self, place: int) -> dict[str, int]:
        """Where a place is along each axis."""
        found = {}
        for axis, size in reversed(list(self.sizes.items())):
            place, found[axis] = divmod(place, size)
        return {axis: found[axis] for axis in self.sizes}

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The places that differ along one axis alone, together; each in the order of the axis."""
        found: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for place in range(self.total_size):
            others = self.coordinates(place)
            others.pop(axis, None)
            found.setdefault(tuple(others.items()), []).append(place)
        own = (
            found.values() if axis in self.sizes else ([place] for place in range(self.total_size))
        )
        return tuple(tuple(places) for places in own)
