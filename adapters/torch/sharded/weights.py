"""Sharded weights (ZeRO stage 3): gathered unit by unit as they are read, gradients reduce-scattered."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from isotrain.adapters.common import weight_sharding
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import TensorOrShard, TensorShard
from isotrain.adapters.torch.base.without_values import lacks_values
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.replica.replica import TorchReplica
from isotrain.adapters.torch.trainer.state import in_place
from isotrain.plugin import DATA, SHARD, DeviceMesh, Reduction, SpecError

Kind = Literal["gather", "reduce", "end"]


class CollectiveCall(NamedTuple):
    """A collective that all replicas have to run at the same point.

    Attributes:
        kind: `gather`: all-gather of a unit's weights; `reduce`: reduce-scatter of its gradients; `end`:
            end of a forward pass.
        number: Index of the unit; for `end`, 1 if a backward pass follows, else 0.
    """

    kind: Kind
    number: int


_LAST = CollectiveCall("reduce", 0)
"""Last call of a step: gradients are reduced once a step, from the last unit to the first."""
_NO_BACKWARD = CollectiveCall("end", 0)
"""End of a forward pass without a backward pass (evaluation)."""


class CollectiveOrder:
    """Predicts the next collective from the order in the last step.

    It depends only on calls that all replicas have made, so all replicas predict the same.
    """

    def __init__(self) -> None:
        """Starts without a prediction."""
        self._calls: list[CollectiveCall] = []
        self._position = 0

    @property
    def next(self) -> CollectiveCall | None:
        """The call that all replicas expect; None without a prediction."""
        return self._calls[self._position] if self._position < len(self._calls) else None

    def note(self, done: CollectiveCall) -> None:
        """Records a call that all replicas have made."""
        if done == _NO_BACKWARD:
            self._position = 0
            return
        if done != self.next:
            self._calls[self._position :] = [done]
        self._position += 1
        if done == _LAST:
            del self._calls[self._position :]
            self._position = 0


_KINDS: tuple[Kind, ...] = ("gather", "reduce", "end")
_DESCRIPTIONS: Mapping[str, str] = {
    "gather": "reads {}",
    "reduce": "has the gradient of {}",
    "end": "is through with its forward pass",
}
"""Descriptions of a replica's call, by kind, in the error for differing replicas."""


class ShardSpec(weight_sharding.ShardSpec):
    """Axis and shard lengths along which a torch tensor is sharded."""

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of all shards, of `shard_shape`, of an unsharded tensor of the spec's shape."""
        return tensor.split(self.shard_lengths, self.axis)

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The unsharded tensor, from all of its shards as vectors."""
        shaped = [shard.view(self.shard_shape(index)) for index, shard in enumerate(shards)]
        return torch.cat(shaped, self.axis)

    def as_shard(self, shard: torch.Tensor, index: int) -> TensorShard:
        """Adds the global shape and the offset to shard number `index`."""
        return TensorShard(shard, torch.Size(self.shape), self.shard_offset(index))


class ShardedWeights:
    """Weights of a replica that keeps a shard of each, and gathers them unit by unit.

    The model's parameters keep their shapes, and have data only while all weights are unsharded: otherwise,
    whatever reads one without `read` sees NaN. All replicas must read the same weights in the same order, and
    raise an error where they differ. A collective that the last step does not predict is agreed upon first
    (an all-gather of three numbers). A predicted one is run at once, and one more number in it says for each
    replica whether it was the right one.

    Attributes:
        parameters: Parameters of the model, in order.
        local_shards: This replica's shard of each parameter, contiguous, of the parameter's rank and dtype.
        reduction: Reduce-scatter of a step's gradients, bucket by bucket, for `BucketedGradients`.
        absent: Indices of parameters without data, by the storage that stands in for it.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        units: Sequence[Sequence[int]],
        communicator: Communicator,
        mesh: DeviceMesh,
    ) -> None:
        """Keeps this replica's shard of each weight, and frees the rest. Local.

        Args:
            weights: Parameters by name, of one dtype, equal on all replicas.
            units: Indices of the weights that are gathered together; each weight is in one unit.
            communicator: Communicator of the replica.
            mesh: Device mesh; weights are sharded along its shard axis, and replicated along its data axis.
        """
        groups = mesh.groups(SHARD)
        members = next(group for group in groups if communicator.rank in group)
        self._members = members
        self._shard_index = members.index(communicator.rank)
        self._shard_groups = groups if len(groups) > 1 else ()
        self._data_groups = mesh.groups(DATA) if DATA in mesh.sizes else ()
        self._communicator = communicator
        self._order = CollectiveOrder()
        self._names = list(weights)
        self.parameters = list(weights.values())
        self._shard_specs = [ShardSpec(weight.shape, len(members)) for weight in self.parameters]
        self._units = [tuple(unit) for unit in units]
        self._unit_of = {index: number for number, unit in enumerate(units) for index in unit}
        self._gathered: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._gathered_unit: int | None = None
        self._is_unsharded = True
        self._whole: Sequence[torch.Tensor] | None = None
        self.absent: dict[Hashable, int] = {}
        self.local_shards = [
            spec.split(weight.detach())[self._shard_index].clone(
                memory_format=torch.contiguous_format
            )
            for spec, weight in zip(self._shard_specs, self.parameters, strict=True)
        ]
        backwards = tuple(reversed(self._units))
        self.reduction = Reduction(backwards, backwards, self._reduce_unit)
        self.reshard()

    @property
    def is_unsharded(self) -> bool:
        """Whether this replica has all weights."""
        return self._is_unsharded

    def as_shard(self, index: int, shard: torch.Tensor) -> TensorShard:
        """Adds global shape and offset to this replica's shard of a tensor sharded as weight `index` is."""
        return self._shard_specs[index].as_shard(shard, self._shard_index)

    def local_shard_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """This replica's shard of a tensor in the shape of weight `index`; a shard is returned as it is."""
        spec = self._shard_specs[index]
        is_unsharded = value.shape == torch.Size(spec.shape)
        return spec.split(value)[self._shard_index] if is_unsharded else value

    def local_tensors(self) -> dict[str, TensorOrShard]:
        """This replica's shards by name; all weights while they are unsharded."""
        if self._is_unsharded:
            return dict(zip(self._names, self.parameters, strict=True))
        shards = map(self.as_shard, range(len(self.local_shards)), self.local_shards)
        return dict(zip(self._names, shards, strict=True))

    def write(self, name: str, value: torch.Tensor) -> None:
        """Sets a weight to a value of its shape, or of the shape of this replica's shard. Local."""
        in_place(self.local_tensors()).write(name, value)
        if self._is_unsharded:
            index = self._names.index(name)
            with torch.no_grad():
                self.local_shards[index].copy_(
                    self.local_shard_of(index, self.parameters[index].detach())
                )

    def read(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Gathers a weight with its unit, which replaces the unit gathered before. Collective.

        Args:
            index: Index of the weight.
            dtype: Dtype of the result.

        Returns:
            The weight in its shape, without gradients; valid until the next update.

        Raises:
            SpecError: Another replica makes another call at this point.
        """
        if self._is_unsharded:
            return self.parameters[index].detach().to(dtype)
        unit = self._unit_of[index]
        if unit != self._gathered_unit:
            self.free_gathered()
            flat = self._run_collective(CollectiveCall("gather", unit), index)
            weight_dtype = self.local_shards[index].dtype
            gathered = zip(self._units[unit], self._split_unit(unit, flat), strict=True)
            self._gathered = {(each, weight_dtype): weight for each, weight in gathered}
            self._gathered_unit = unit
        if (index, dtype) not in self._gathered:
            self._gathered[index, dtype] = self._gathered[index, self.local_shards[index].dtype].to(
                dtype
            )
        return self._gathered[index, dtype]

    def end_forward(self) -> None:
        """Checks that all replicas have reached the end of their forward pass. Collective.

        Raises:
            SpecError: Another replica goes on reading.
        """
        if not self._is_unsharded:
            self._require_agreement(CollectiveCall("end", int(torch.is_grad_enabled())), 0)

    def free_gathered(self) -> None:
        """Frees the gathered unit, as its weights are about to change. Local.

        Raises:
            SpecError: The model has set one of its weights.
        """
        gathered, self._gathered = self._gathered, {}
        self._gathered_unit = None
        for (index, _), weight in gathered.items():
            if private_api.version_of(weight):
                raise SpecError(
                    f"strategy sharded: {self._names[index]} is set in a forward pass, and with stage=3 no"
                    " replica has all of it. Use stage 1 or 2."
                )

    def unshard(self) -> None:
        """Gathers all weights, which stay unsharded until `reshard`. Collective."""
        if self._is_unsharded:
            return
        self.free_gathered()
        for number, unit in enumerate(self._units):
            weights = self._split_unit(number, self._all_gather_unit(number)[0])
            for index, weight in zip(unit, weights, strict=True):
                self.parameters[index].data = weight
        self.absent = {}
        self._is_unsharded = True

    def reshard(self) -> None:
        """Frees all weights but this replica's shards. Local."""
        if not self._is_unsharded:
            return
        for weight in self.parameters:
            weight.data = weight.new_full((), torch.nan).expand(weight.shape)
        self.absent = {
            private_api.storage_of(weight): index for index, weight in enumerate(self.parameters)
        }
        self._is_unsharded = False

    def in_weight_order(self, reduced: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sorts the gradient shards from all buckets of `reduction` by weight; shapes of `local_shards`."""
        indices = [index for unit in self.reduction.buckets for index in unit]
        by_index = dict(zip(indices, reduced, strict=True))
        return [by_index[index] for index in range(len(self.local_shards))]

    def norms(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """L2 norms, scalars, of the unsharded tensors, from this replica's shards. Collective."""
        if self._whole is not None:
            return list(private_api.foreach_norm([each.contiguous() for each in self._whole]))
        squares = torch.stack([each.square().sum() for each in tensors])
        if self._shard_groups:
            total = self._communicator.all_reduce_within(squares, self._shard_groups)
        else:
            total = self._communicator.all_reduce(squares, "sum")
        return list(total.sqrt().unbind())

    @contextlib.contextmanager
    def norms_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which `norms` returns those of unsharded tensors, with the bits of their norms. Local.

        Args:
            tensors: The tensors whose shards `norms` is given, in the shapes of the weights.
        """
        self._whole = tensors
        try:
            yield
        finally:
            self._whole = None

    def _run_collective(
        self, call: CollectiveCall, index: int, gradients: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Runs a `gather` or `reduce` call, after a check that all replicas make it. Collective.

        Args:
            call: Call that this replica has to make.
            index: Index of the weight that an error names.
            gradients: Unsharded gradients of the unit, in a `reduce` call; emptied.

        Returns:
            `gather`: vector for `_split_unit`. `reduce`: sums of this replica's gradient shards, a vector.

        Raises:
            SpecError: Another replica has to make another call.
        """
        expected = self._order.next
        if expected is not None and expected.kind != "end":
            result, is_valid = self._execute(expected, call, gradients)
            if is_valid:
                self._order.note(call)
                return result
        self._require_agreement(call, index)
        return self._execute(call, call, gradients)[0]

    def _execute(
        self, executed: CollectiveCall, call: CollectiveCall, gradients: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, bool]:
        """Executes a call, predicted or agreed upon; returns a vector, and whether it was right for all."""
        deviates = float(executed != call)
        if executed.kind == "gather":
            return self._all_gather_unit(executed.number, deviates)
        unit = self._units[executed.number]
        if gradients is None or deviates:
            gradients = [self.local_shards[i].new_zeros(self._shard_specs[i].shape) for i in unit]
        vector = self._flat_shards(unit, gradients, deviates)
        gradients.clear()
        result = self._communicator.reduce_scatter(vector, self._sizes(unit), self._shard_groups)
        return result[:-1], _none_deviates(result[-1])

    def _require_agreement(self, call: CollectiveCall, index: int) -> None:
        """Checks that all replicas have to make a call; `index` is that of the weight that an error names."""
        row = torch.tensor(
            [_KINDS.index(call.kind), call.number, index], device=self.local_shards[0].device
        )
        rows = self._communicator.all_gather_shards(
            row, [3] * len(self._members), self._shard_groups
        ).view(-1, 3)
        calls: dict[tuple[int, ...], str] = {}
        for rank, (kind, number, weight) in zip(self._members, rows.tolist(), strict=True):
            description = _DESCRIPTIONS[_KINDS[kind]].format(self._names[weight])
            calls.setdefault((kind, number), f"replica {rank} {description}")
        if len(calls) > 1:
            raise SpecError(
                f"strategy sharded: replicas read different weights: {', '.join(calls.values())}. With"
                " stage=3 all must read the same ones in the same order, and this model chooses by its data"
                " or at random. Use stage 1 or 2."
            )
        self._order.note(call)

    def _sizes(self, unit: Sequence[int]) -> list[int]:
        """Length of each replica's shards of a unit, plus one for the flag that says whether it deviates."""
        return [
            size + 1
            for size in weight_sharding.shard_sizes([self._shard_specs[index] for index in unit])
        ]

    def _all_gather_unit(self, number: int, deviates: float = 0.0) -> tuple[torch.Tensor, bool]:
        """All-gathers a unit's shards and flags into one vector; also returns whether no replica deviates."""
        unit = self._units[number]
        shards = [self.local_shards[index] for index in unit]
        flat = _flat([*shards, shards[0].new_tensor(deviates)])
        sizes = self._sizes(unit)
        gathered = self._communicator.all_gather_shards(flat, sizes, self._shard_groups)
        flags = torch.stack([each[-1] for each in gathered.split(sizes)])
        return gathered, _none_deviates(flags)

    def _split_unit(self, number: int, gathered: torch.Tensor) -> list[torch.Tensor]:
        """The weights of a unit, in their shapes, from the vector of `_all_gather_unit`."""
        unit = self._units[number]
        by_replica = [
            flat[:-1].split([self._shard_specs[index].shard_numel(replica) for index in unit])
            for replica, flat in enumerate(gathered.split(self._sizes(unit)))
        ]
        by_weight = zip(unit, zip(*by_replica, strict=True), strict=True)
        return [self._shard_specs[index].merge(shards) for index, shards in by_weight]

    def _reduce_unit(
        self, replica: TorchReplica, gradients: list[torch.Tensor], *, static: Sequence[int]
    ) -> list[torch.Tensor]:
        """Averages the gradients of a unit over all replicas, and frees them and its gathered weights.

        Args:
            replica: Handle of this replica.
            gradients: Gradients of the unit's weights, in their shapes; emptied.
            static: Indices of the unit's weights.

        Returns:
            This replica's shards of the mean gradients.
        """
        unit = self._unit_of[static[0]]
        if unit == self._gathered_unit:
            self.free_gathered()
        total = self._run_collective(CollectiveCall("reduce", unit), static[0], gradients)
        if self._data_groups:
            total = self._communicator.all_reduce_within(total, self._data_groups)
        means = (total / replica.replicas).split(
            [self.local_shards[index].numel() for index in static]
        )
        return [
            mean.view_as(self.local_shards[index])
            for index, mean in zip(static, means, strict=True)
        ]

    def _flat_shards(
        self, indices: Sequence[int], tensors: Sequence[torch.Tensor], deviates: float
    ) -> torch.Tensor:
        """Input vector of a reduce-scatter: each replica's shards of some tensors, then a deviation flag."""
        pairs = zip(indices, tensors, strict=True)
        by_weight = [self._shard_specs[index].split(tensor) for index, tensor in pairs]
        flag = tensors[0].new_tensor(deviates)
        by_replica = ([*shards, flag] for shards in zip(*by_weight, strict=True))
        return _flat(shard for shards in by_replica for shard in shards)


def _none_deviates(flags: torch.Tensor) -> bool:
    """Whether flags of any shape are 0; flags without values are those of this process alone."""
    return lacks_values(flags) or not flags.any()


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One vector of the elements of all tensors, which have one dtype."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])
