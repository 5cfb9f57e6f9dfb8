"""Weights that lie in parts over the replicas, and are joined unit by unit as they are read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from isotrain.adapters.common import sharding
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import TensorOrShard, TensorShard
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.replica.handle import TorchReplica
from isotrain.adapters.torch.trainer.state import in_place
from isotrain.plugin import DATA, SHARD, DeviceMesh, Reduction, SpecError

Kind = Literal["reads", "gives", "ends"]


class CollectiveCall(NamedTuple):
    """What all replicas do at one time.

    Attributes:
        kind: They join a unit's weights, sum its gradients, or have come to the end of a forward pass.
        number: Of the unit; at such an end, whether a backward pass follows.
    """

    kind: Kind
    number: int


_LAST = CollectiveCall("gives", 0)
"""Units give their gradients once a step, from the last one to the first."""
_ALONE = CollectiveCall("ends", 0)
"""The end of a forward pass that is not of a step."""


class CollectiveOrder:
    """What comes next if this step goes as the last one did.

    It hangs on nothing but what all replicas have done together, so that all expect the same.
    """

    def __init__(self) -> None:
        """Expects nothing."""
        self._steps: list[CollectiveCall] = []
        self._at = 0

    @property
    def next(self) -> CollectiveCall | None:
        """What all expect to do; None where this was not seen yet."""
        return self._steps[self._at] if self._at < len(self._steps) else None

    def note(self, done: CollectiveCall) -> None:
        """Is told what all have done."""
        if done == _ALONE:
            self._at = 0
            return
        if done != self.next:
            self._steps[self._at :] = [done]
        self._at += 1
        if done == _LAST:
            del self._steps[self._at :]
            self._at = 0


_KINDS: tuple[Kind, ...] = ("reads", "gives", "ends")
_WHAT: Mapping[str, str] = {
    "reads": "reads {}",
    "gives": "has the gradient of {}",
    "ends": "is through with its forward pass",
}
"""What a replica says of itself where others do something else."""


class ShardSpec(sharding.ShardSpec):
    """How a tensor is cut."""

    def split(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """All parts of a tensor."""
        return whole.split(self.shard_lengths, self.axis)

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of parts that are flat."""
        shaped = [part.view(self.shard_shape(place)) for place, part in enumerate(parts)]
        return torch.cat(shaped, self.axis)

    def as_shard(self, own: torch.Tensor, place: int) -> TensorShard:
        """A part of a tensor that is cut so."""
        return TensorShard(own, torch.Size(self.shape), self.shard_offset(place))


class ShardedWeights:
    """The weights of a replica, which keeps a part of each.

    The parameters of the model keep their shapes, and have numbers only while all weights are here: between,
    what reads one past `read` meets NaN. All replicas read the same weights in the same order, and raise an
    error where they differ: of what none expects by the step before they tell each other first, and else do
    what all expect, along with which each says whether that was what it had to do.

    Attributes:
        parameters: The model's, in order.
        local_shards: Of each the own one.
        reduction: What is to be done with the gradients of a step.
        absent: The places of parameters without numbers, by what memory they have instead.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        units: Sequence[Sequence[int]],
        communicator: Communicator,
        mesh: DeviceMesh,
    ) -> None:
        """Keeps the own part of each weight, and lets all else go.

        Args:
            weights: The parameters by name, of one type, equal on all replicas.
            units: The places of those that are joined together; each is in one of them.
            communicator: Ties this replica to the others.
            mesh: How parts lie over the replicas.
        """
        groups = mesh.groups(SHARD)
        members = next(group for group in groups if communicator.rank in group)
        self._members = members
        self._place = members.index(communicator.rank)
        self._within = groups if len(groups) > 1 else ()
        self._same = mesh.groups(DATA) if DATA in mesh.sizes else ()
        self._communicator = communicator
        self._order = CollectiveOrder()
        self._names = list(weights)
        self.parameters = list(weights.values())
        self._shard_specs = [ShardSpec(weight.shape, len(members)) for weight in self.parameters]
        self._units = [tuple(unit) for unit in units]
        self._unit_of = {place: number for number, unit in enumerate(units) for place in unit}
        self._here: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._unit_here: int | None = None
        self._is_unsharded = True
        self.absent: dict[Hashable, int] = {}
        self.local_shards = [
            cut.split(weight.detach())[self._place].clone(memory_format=torch.contiguous_format)
            for cut, weight in zip(self._shard_specs, self.parameters, strict=True)
        ]
        backwards = tuple(reversed(self._units))
        self.reduction = Reduction(backwards, backwards, self._reduced)
        self.reshard()

    @property
    def is_unsharded(self) -> bool:
        """Whether all weights are here."""
        return self._is_unsharded

    def as_shard(self, place: int, own: torch.Tensor) -> TensorShard:
        """What lies as a weight does."""
        return self._shard_specs[place].as_shard(own, self._place)

    def local_shard_of(self, place: int, value: torch.Tensor) -> torch.Tensor:
        """Of a value that lies as a weight does the own part, where all of it is given."""
        cut = self._shard_specs[place]
        is_whole = value.shape == torch.Size(cut.shape)
        return cut.split(value)[self._place] if is_whole else value

    def local_tensors(self) -> dict[str, TensorOrShard]:
        """What this replica has by name: its parts; all weights, while they are here."""
        if self._is_unsharded:
            return dict(zip(self._names, self.parameters, strict=True))
        parts = map(self.as_shard, range(len(self.local_shards)), self.local_shards)
        return dict(zip(self._names, parts, strict=True))

    def write(self, name: str, value: torch.Tensor) -> None:
        """Sets a weight, of which all or the own part is given."""
        in_place(self.local_tensors()).write(name, value)
        if self._is_unsharded:
            place = self._names.index(name)
            with torch.no_grad():
                self.local_shards[place].copy_(
                    self.local_shard_of(place, self.parameters[place].detach())
                )

    def read(self, place: int, dtype: torch.dtype) -> torch.Tensor:
        """A weight, without gradients, as it is until the next update. Joins its unit in place of another.

        Raises:
            SpecError: Another replica does something else at this time.
        """
        if self._is_unsharded:
            return self.parameters[place].detach().to(dtype)
        unit = self._unit_of[place]
        if unit != self._unit_here:
            self.forget()
            whole = self._together(CollectiveCall("reads", unit), place)
            own = self.local_shards[place].dtype
            joined = zip(self._units[unit], self._cut_up(unit, whole), strict=True)
            self._here = {(each, own): weight for each, weight in joined}
            self._unit_here = unit
        if (place, dtype) not in self._here:
            self._here[place, dtype] = self._here[place, self.local_shards[place].dtype].to(dtype)
        return self._here[place, dtype]

    def end_forward(self) -> None:
        """Is called by all replicas at the end of a forward pass.

        Raises:
            SpecError: Another replica goes on reading.
        """
        if not self._is_unsharded:
            self._agree(CollectiveCall("ends", int(torch.is_grad_enabled())), 0)

    def forget(self) -> None:
        """Lets the unit go that is here: the next step has other weights.

        Raises:
            SpecError: Somebody has set one of them.
        """
        here, self._here = self._here, {}
        self._unit_here = None
        for (place, _), weight in here.items():
            if private_api.version_of(weight):
                raise SpecError(
                    f"strategy sharded: {self._names[place]} is set in a forward pass, and with stage=3 no"
                    " replica has all of it. Take stage 1 or 2."
                )

    def unshard(self) -> None:
        """Has all weights here until `reshard`."""
        if self._is_unsharded:
            return
        self.forget()
        for number, unit in enumerate(self._units):
            joined = self._cut_up(number, self._join(number)[0])
            for place, whole in zip(unit, joined, strict=True):
                self.parameters[place].data = whole
        self.absent = {}
        self._is_unsharded = True

    def reshard(self) -> None:
        """Leaves this replica its parts alone."""
        if not self._is_unsharded:
            return
        for weight in self.parameters:
            weight.data = weight.new_full((), torch.nan).expand(weight.shape)
        self.absent = {
            private_api.storage_of(weight): place for place, weight in enumerate(self.parameters)
        }
        self._is_unsharded = False

    def in_weight_order(self, reduced: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What `reduction` has kept, in the order of the weights."""
        places = [place for unit in self.reduction.buckets for place in unit]
        found = dict(zip(places, reduced, strict=True))
        return [found[place] for place in range(len(self.local_shards))]

    def norms(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The norms of the wholes of tensors of which the replicas have parts."""
        squares = torch.stack([each.square().sum() for each in tensors])
        if self._within:
            total = self._communicator.all_reduce_within(squares, self._within)
        else:
            total = self._communicator.all_reduce(squares, "sum")
        return list(total.sqrt().unbind())

    def _together(
        self, own: CollectiveCall, place: int, gradients: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What comes of doing this with all others.

        Args:
            own: What this replica has to do.
            place: Of the weight to be named.
            gradients: That it gives, if it does.

        Raises:
            SpecError: Others have to do something else.
        """
        expected = self._order.next
        if expected is not None and expected.kind != "ends":
            found, all_do = self._carried_out(expected, own, gradients)
            if all_do:
                self._order.note(own)
                return found
        self._agree(own, place)
        return self._carried_out(own, own, gradients)[0]

    def _carried_out(
        self, work: CollectiveCall, own: CollectiveCall, gradients: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, bool]:
        """What comes of this; and whether all had to do it: else it is worth nothing."""
        departs = float(work != own)
        if work.kind == "reads":
            return self._join(work.number, departs)
        unit = self._units[work.number]
        if gradients is None or departs:
            gradients = [self.local_shards[p].new_zeros(self._shard_specs[p].shape) for p in unit]
        vector = self._flat_shards(unit, gradients, departs)
        gradients.clear()
        found = self._communicator.reduce_scatter(vector, self._sizes(unit), self._within)
        return found[:-1], not found[-1]

    def _agree(self, own: CollectiveCall, place: int) -> None:
        """Checks that all do this; the place is that of the weight to be named."""
        told = torch.tensor(
            [_KINDS.index(own.kind), own.number, place], device=self.local_shards[0].device
        )
        rows = self._communicator.all_gather_shards(
            told, [3] * len(self._members), self._within
        ).view(-1, 3)
        first: dict[tuple[int, ...], str] = {}
        for rank, (kind, number, place) in zip(self._members, rows.tolist(), strict=True):
            what = _WHAT[_KINDS[kind]].format(self._names[place])
            first.setdefault((kind, number), f"replica {rank} {what}")
        if len(first) > 1:
            raise SpecError(
                f"strategy sharded: replicas read other weights: {', '.join(first.values())}. With stage=3"
                " all read the same in the same order, and this model chooses by what it computes with, or"
                " at random. Take stage 1 or 2."
            )
        self._order.note(own)

    def _sizes(self, unit: Sequence[int]) -> list[int]:
        """How many numbers of a unit each replica has, and the one that says whether it departs."""
        return [
            size + 1 for size in sharding.shard_sizes([self._shard_specs[place] for place in unit])
        ]

    def _join(self, number: int, departs: float = 0.0) -> tuple[torch.Tensor, bool]:
        """The parts of all replicas of a unit's weights; and whether none of them departs."""
        unit = self._units[number]
        own = [self.local_shards[place] for place in unit]
        part = _flat([*own, own[0].new_tensor(departs)])
        sizes = self._sizes(unit)
        whole = self._communicator.all_gather_shards(part, sizes, self._within)
        return whole, not torch.stack([of_replica[-1] for of_replica in whole.split(sizes)]).any()

    def _cut_up(self, number: int, whole: torch.Tensor) -> list[torch.Tensor]:
        """The weights of a unit, of what `_join` gave."""
        unit = self._units[number]
        of_each = [
            of_replica[:-1].split([self._shard_specs[place].shard_numel(replica) for place in unit])
            for replica, of_replica in enumerate(whole.split(self._sizes(unit)))
        ]
        pieces = zip(unit, zip(*of_each, strict=True), strict=True)
        return [self._shard_specs[place].merge(parts) for place, parts in pieces]

    def _reduced(
        self, replica: TorchReplica, gradients: list[torch.Tensor], *, static: Sequence[int]
    ) -> list[torch.Tensor]:
        """The own parts of the means of the gradients of a unit; lets these go, and its weights."""
        unit = self._unit_of[static[0]]
        if unit == self._unit_here:
            self.forget()
        own = self._together(CollectiveCall("gives", unit), static[0], gradients)
        if self._same:
            own = self._communicator.all_reduce_within(own, self._same)
        means = (own / replica.replicas).split(
            [self.local_shards[place].numel() for place in static]
        )
        return [
            mean.view_as(self.local_shards[place])
            for place, mean in zip(static, means, strict=True)
        ]

    def _flat_shards(
        self, places: Sequence[int], wholes: Sequence[torch.Tensor], departs: float
    ) -> torch.Tensor:
        """What lies as weights do, in a row: what each replica has, and for each whether this one departs."""
        pairs = zip(places, wholes, strict=True)
        parted = [self._shard_specs[place].split(whole) for place, whole in pairs]
        departure = wholes[0].new_tensor(departs)
        rows = ([*of_replica, departure] for of_replica in zip(*parted, strict=True))
        return _flat(part for row in rows for part in row)


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])
