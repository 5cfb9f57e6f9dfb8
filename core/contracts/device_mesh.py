"""The device mesh of a run: its positions as a grid with named axes, as torch's `DeviceMesh` has it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DATA, SHARD, STAGE, TENSOR = "data", "shard", "stage", "tensor"


@dataclass(frozen=True)
class DeviceMesh:
    """Grid of positions with named axes, in row-major order: neighbors differ along the last axis.

    Positions along `data` hold equal state, those along `shard` hold its shards; along both, each position is
    a replica with its own local batch. Positions along `stage` are the pipeline stages of one replica, those
    along `tensor` its parts, which hold slices of its layers. A stage may have several positions, which hold
    equal state and follow each other.

    Attributes:
        sizes: Axis name to size; the slowest varying axis first.
        stage_processes: Number of positions of each stage of a replica; empty where each stage has one.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    stage_processes: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, int | list[int]]:
        """Axis name to size; of stages with several positions, the number of each. Plain JSON values."""
        stages = {STAGE: list(self.stage_processes)} if self.stage_processes else {}
        return {**self.sizes, **stages}

    def size(self, axis: str) -> int:
        """Size of an axis; 1 for a missing axis."""
        return self.sizes.get(axis, 1)

    @property
    def total_size(self) -> int:
        """Number of positions."""
        return math.prod(self._positions.values())

    @property
    def _positions(self) -> dict[str, int]:
        """Axis name to number of positions, in which each stage counts as often as it has positions."""
        if not self.stage_processes:
            return dict(self.sizes)
        return {**self.sizes, STAGE: sum(self.stage_processes)}

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
        for axis, size in reversed(self._positions.items()):
            index, coordinates[axis] = divmod(index, size)
        if self.stage_processes:
            ends = list(itertools.accumulate(self.stage_processes))
            coordinates[STAGE] = bisect.bisect_right(ends, coordinates[STAGE])
        return {axis: coordinates[axis] for axis in self.sizes}

    def index_in_group(self, index: int, axis: str) -> int:
        """Index of a position in its group along an axis: 0 for the first of those with equal state."""
        return next(group.index(index) for group in self.groups(axis) if index in group)

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
