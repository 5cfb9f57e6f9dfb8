"""How a weight is cut into parts that lie over replicas; imports no framework."""

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
    """A description of state that says which slots are here and on no other replica.

    Args:
        described: As if all replicas had all of it.
        is_alone: Tells of a slot whether it is of a weight that this replica alone updates.
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
        name: Of any state.
        is_elsewhere: Tells of a slot whether it is of a weight that only another replica updates.
    """
    return name.startswith(_KIND) and is_elsewhere(_slot(name))


def _slot(name: str) -> str:
    return name.removeprefix(_KIND)


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor is cut: along its longest axis, into parts that differ by a row at most.

    Attributes:
        shape: Of the whole.
        num_shards: Into how many.
    """

    shape: Sequence[int]
    num_shards: int

    @functools.cached_property
    def axis(self) -> int:
        """Along which it is cut."""
        return max(range(len(self.shape)), key=self.shape.__getitem__)

    @functools.cached_property
    def shard_lengths(self) -> list[int]:
        """Of the parts, along the axis."""
        least, more = divmod(self.shape[self.axis], self.num_shards)
        return [least + (place < more) for place in range(self.num_shards)]

    def shard_shape(self, place: int) -> list[int]:
        """Of a part."""
        shape = [*self.shape]
        shape[self.axis] = self.shard_lengths[place]
        return shape

    def shard_numel(self, place: int) -> int:
        """How many are in a part."""
        return math.prod(self.shard_shape(place))

    def shard_offset(self, place: int) -> list[int]:
        """Where in the whole a part begins."""
        offset = [0] * len(self.shape)
        offset[self.axis] = sum(self.shard_lengths[:place])
        return offset


def shard_sizes(cuts: Sequence[ShardSpec]) -> list[int]:
    """How many numbers each replica has of some tensors.

    Args:
        cuts: Of the tensors, all into as many parts.
    """
    return [sum(cut.shard_numel(place) for cut in cuts) for place in range(cuts[0].num_shards)]


def require_shardable(undivided: Sequence[str], types: Collection[str]) -> None:
    """Refuses trainable weights of which a part cannot be kept and updated alone.

    Args:
        undivided: The names of weights that are single numbers, or of which more than that is to hold.
        types: Of all weights.

    Raises:
        SpecError: There are such.
    """
    require_all_sharded(undivided)
    require_single_dtype(types)


def require_all_sharded(undivided: Sequence[str]) -> None:
    """Refuses weights, by name, that have no part.

    Raises:
        SpecError: There are such.
    """
    if undivided:
        raise SpecError(
            f"strategy sharded: {', '.join(undivided)}: stage=3 takes no weight apart that is a single number"
            " or has a constraint. Take stage 1 or 2."
        )


def require_single_dtype(types: Collection[str]) -> None:
    """Refuses weights of several types, and of a type that is not updated in parts.

    Raises:
        SpecError: They are.
    """
    if not set(types) <= {"float32", "float64"} or len(types) != 1:
        raise SpecError(
            "strategy sharded: stage=3 takes trainable weights of one type, float32 or float64; those of"
            f" this model are {', '.join(sorted(types)) or 'none'}. Take stage 1 or 2."
        )


def fsdp_units(
    names: Sequence[str], sizes: Sequence[int], unit_bytes: int, separator: str
) -> list[list[int]]:
    """The places of weights that are joined together: of layers next to each other, as far as these fit.

    A layer is not divided: it may read its weights in turns.

    Args:
        names: Of the weights: that of their layer, a separator, and their own.
        sizes: Of the weights, in bytes.
        unit_bytes: Of those that are joined together, but for layers that have more.
        separator: In names.
    """
    places = range(len(names))
    layers = itertools.groupby(places, lambda place: names[place].rpartition(separator)[0])
    units: list[list[int]] = []
    filled = unit_bytes
    for _, layer in layers:
        own = list(layer)
        size = sum(sizes[place] for place in own)
        if filled + size > unit_bytes:
            units.append([])
            filled = 0
        units[-1] += own
        filled += size
    return units
