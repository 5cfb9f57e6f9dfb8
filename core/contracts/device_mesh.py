"""The device mesh of a run: its positions as a grid with named axes, as torch's `DeviceMesh` has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DATA, SHARD, STAGE, TENSOR = "data", "shard", "stage", "tensor"


@dataclass(frozen=True)
class DeviceMesh:
    """Grid of positions with named axes, in row-major order: neighbors differ along the last axis.

    Positions along `data` hold equal state, those along `shard` hold its shards; along both, each position is
    a replica with its own local batch. Positions along `stage` are the pipeline stages of one replica, those
    along `tensor` its parts, which hold slices of its layers.

    Attributes:
        sizes: Axis name to size; the slowest varying axis first.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Size of an axis; 1 for a missing axis."""
        return self.sizes.get(axis, 1)

    @property
    def total_size(self) -> int:
        """Number of positions."""
        return math.prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        """Number of replicas, each with its own local batch."""
        return self.size(DATA) * self.size(SHARD)

    @property
    def positions_per_replica(self) -> int:
        """Number of positions that share a replica and its local batch."""
        return self.total_size // self.replicas

    @property
    def replica_axis(self) -> str:
        """Axis along which positions share a replica: `tensor` if there is one, else `stage`."""
        return TENSOR if TENSOR in self.sizes else STAGE

    def coordinates(self, index: int) -> dict[str, int]:
        """Axis name to coordinate of a position."""
        coordinates = {}
        for axis, size in reversed(list(self.sizes.items())):
            index, coordinates[axis] = divmod(index, size)
        return {axis: coordinates[axis] for axis in self.sizes}

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Groups of positions that differ along one axis only, each in the order of the axis."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for index in range(self.total_size):
            others = self.coordinates(index)
            others.pop(axis, None)
            groups.setdefault(tuple(others.items()), []).append(index)
        if axis not in self.sizes:
            return tuple((index,) for index in range(self.total_size))
        return tuple(map(tuple, groups.values()))
