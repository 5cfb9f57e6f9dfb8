"""Sharding of weights over replicas; imports no framework."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from isotrain.plugin import SpecError, StateInfo

_KIND = "optimizer/"


def mark_local_slots(
    described: Mapping[str, StateInfo], is_alone: Callable[[str], bool]
) -> dict[str, StateInfo]:
    """Marks the optimizer slots that only this replica has, in a description of state.

    Args:
        described: Description of state, as if all replicas had all of it.
        is_alone: Whether a slot belongs to a weight that this replica alone updates.
    """
    return {
        name: info.on_this_replica_only()
        if name.startswith(_KIND) and is_alone(_slot(name))
        else info
        for name, info in described.items()
    }


def is_remote(name: str, is_elsewhere: Callable[[str], bool]) -> bool:
    """Whether a name in state is that of a slot which only other replicas have.

    Args:
        name: Name of any state.
        is_elsewhere: Whether a slot belongs to a weight that only another replica updates.
    """
    return name.startswith(_KIND) and is_elsewhere(_slot(name))


def _slot(name: str) -> str:
    return name.removeprefix(_KIND)


@dataclass(frozen=True)
class ShardSpec:
    """Shard layout of a tensor: along its longest axis, in shards that differ by one row at most.

    Attributes:
        shape: Shape of the full tensor.
        num_shards: Number of shards.
    """

    shape: Sequence[int]
    num_shards: int

    @functools.cached_property
    def axis(self) -> int:
        """Axis along which the tensor is sharded."""
        return max(range(len(self.shape)), key=self.shape.__getitem__)

    @functools.cached_property
    def shard_lengths(self) -> list[int]:
        """Length of each shard along the axis."""
        base, remainder = divmod(self.shape[self.axis], self.num_shards)
        return [base + (index < remainder) for index in range(self.num_shards)]

    def shard_shape(self, index: int) -> list[int]:
        """Shape of a shard."""
        shape = [*self.shape]
        shape[self.axis] = self.shard_lengths[index]
        return shape

    def shard_numel(self, index: int) -> int:
        """Number of elements of a shard."""
        return math.prod(self.shard_shape(index))

    def shard_offset(self, index: int) -> list[int]:
        """Offset of a shard in the full tensor, per axis."""
        offset = [0] * len(self.shape)
        offset[self.axis] = sum(self.shard_lengths[:index])
        return offset


def shard_sizes(shard_specs: Sequence[ShardSpec]) -> list[int]:
    """Number of elements that each replica has of some tensors.

    Args:
        shard_specs: Shard layouts of the tensors, with equal `num_shards`.
    """
    return [
        sum(shard_spec.shard_numel(index) for shard_spec in shard_specs)
        for index in range(shard_specs[0].num_shards)
    ]


def require_shardable(undivided: Sequence[str], types: Collection[str]) -> None:
    """Refuses trainable weights that cannot be sharded and updated shard by shard.

    Args:
        undivided: Names of weights that are scalars or have a constraint.
        types: Dtypes of all weights, by name.

    Raises:
        SpecError: There are such weights, or the dtypes cannot be sharded.
    """
    require_all_sharded(undivided)
    require_single_dtype(types)


def require_all_sharded(undivided: Sequence[str]) -> None:
    """Refuses weights, by name, that cannot be sharded.

    Raises:
        SpecError: There are some.
    """
    if undivided:
        raise SpecError(
            f"strategy sharded: {', '.join(undivided)}: stage=3 cannot shard a weight that is a single number"
            " or has a constraint. Use stage 1 or 2."
        )


def require_single_dtype(types: Collection[str]) -> None:
    """Refuses weights of several dtypes, and dtypes other than float32 and float64.

    Raises:
        SpecError: There are such dtypes.
    """
    if not set(types) <= {"float32", "float64"} or len(types) != 1:
        raise SpecError(
            "strategy sharded: stage=3 shards trainable weights of one dtype, float32 or float64; received"
            f" {', '.join(sorted(types)) or 'none'}. Use stage 1 or 2."
        )


def fsdp_units(
    names: Sequence[str], sizes: Sequence[int], unit_bytes: int, separator: str
) -> list[list[int]]:
    """Groups the indices of weights into FSDP units: neighbouring layers, as many as fit into `unit_bytes`.

    A layer is not divided: it may read its weights in several steps.

    Args:
        names: Names of the weights: layer name, separator, weight name.
        sizes: Sizes of the weights in bytes.
        unit_bytes: Maximum bytes of a unit; a single layer may have more.
        separator: Separator in the names.
    """
    indices = range(len(names))
    layers = itertools.groupby(indices, lambda index: names[index].rpartition(separator)[0])
    units: list[list[int]] = []
    unit_size = unit_bytes
    for _, layer in layers:
        layer_indices = list(layer)
        layer_bytes = sum(sizes[index] for index in layer_indices)
        if unit_size + layer_bytes > unit_bytes:
            units.append([])
            unit_size = 0
        units[-1] += layer_indices
        unit_size += layer_bytes
    return units
