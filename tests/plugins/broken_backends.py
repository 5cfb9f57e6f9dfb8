"""Backends with one fault each, to see that the conformance checks find it: in NumPy, and one under torch.

Registered by the hook that any plugin uses; the module is loaded where ISOTRAIN_PLUGINS names it. torch is
imported when a run starts, as adapters do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.adapters.torch.adapter import TorchDDP
from isotrain.core.contracts.backend.capabilities import (
    REPLICATED_CAPABILITIES,
    Capabilities,
    Capability,
)
from isotrain.core.contracts.backend.replica import ReduceOp, Subgroups
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.backend.tree_sum import sum_over_replicas
from isotrain.core.contracts.plan import BackendConfig, DeviceKind
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.registries import BackendRegistry
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.testing.reference.adapter import Reference
from isotrain.testing.reference.comm import Communicator
from isotrain.testing.reference.replica_group import ReferenceGroup, ReferenceReplica

if TYPE_CHECKING:
    from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup


class _Broken(Reference):
    """The reference backend with a fault in its group or its replicas."""

    group: type[ReferenceGroup] = ReferenceGroup

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        return self.group(spec, Communicator(context, backend_config.timeout))


def _with_slices(batch: Batch, **changes: Any) -> Batch:
    """The same batch with these fields in every slice."""

    def changed(micro_batches: Sequence[Slice]) -> tuple[Slice, ...]:
        return tuple(replace(micro_batch, **changes) for micro_batch in micro_batches)

    return replace(batch, slices=tuple(map(changed, batch.slices)))


class _IdentityAllReduce(ReferenceReplica):
    def all_reduce(self, tensor: np.ndarray, op: ReduceOp = "sum") -> np.ndarray:
        super().all_reduce(tensor, op)
        return np.array(tensor)


class _WithIdentityAllReduce(ReferenceGroup):
    replica_type = _IdentityAllReduce


class IdentityAllReduce(_Broken):
    """An all-reduce that gives everybody what they gave."""

    name = "broken-identity-all-reduce"
    group = _WithIdentityAllReduce


class _SumForMean(ReferenceReplica):
    def all_reduce(self, tensor: np.ndarray, op: ReduceOp = "sum") -> Any:
        return super().all_reduce(tensor, "sum" if op == "mean" else op)


class _WithSumForMean(ReferenceGroup):
    replica_type = _SumForMean


class SumForMean(_Broken):
    """Gradients, losses and all else are summed where the mean is asked for."""

    name = "broken-sum-for-mean"
    group = _WithSumForMean


class _DroppedSlice(ReferenceGroup):
    def synchronous_step(self, batch: Batch, learning_rate: float) -> np.ndarray:
        is_last = self.replicas - 1 in self.local_replicas
        given = _with_slices(batch, weight=0.0) if is_last else batch
        return super().synchronous_step(given, learning_rate)


class DroppedSlice(_Broken):
    """The last replica takes part in everything, and its samples do not count in training."""

    name = "broken-dropped-slice"
    group = _DroppedSlice


class _SilentBroadcast(ReferenceReplica):
    def broadcast_within(self, tensor: np.ndarray, subgroups: Subgroups) -> np.ndarray:
        super().broadcast_within(tensor, subgroups)
        return np.array(tensor)


class _WithSilentBroadcast(ReferenceGroup):
    replica_type = _SilentBroadcast


class SilentBroadcast(_Broken):
    """A broadcast that reaches nobody but its root."""

    name = "broken-silent-broadcast"
    group = _WithSilentBroadcast


class _CountedPlaceholders(ReferenceGroup):
    def evaluation_step(self, batch: Batch) -> None:
        counts = [
            micro_batch.count for micro_batches in batch.slices for micro_batch in micro_batches
        ]
        super().evaluation_step(batch if all(counts) else _with_slices(batch, count=1))


class CountedPlaceholders(_Broken):
    """Evaluation takes the placeholder of an empty slice for a sample."""

    name = "broken-counted-placeholders"
    group = _CountedPlaceholders


class _TrainsToPredict(ReferenceGroup):
    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        self.model.training = True
        return [self.model(own) for own in inputs]


class TrainsToPredict(_Broken):
    """Predictions are made in training mode."""

    name = "broken-trains-to-predict"
    group = _TrainsToPredict


class _OwnStart(ReferenceGroup):
    def __init__(self, spec: TrainingSpec, exchange: Communicator) -> None:
        super().__init__(spec, exchange)
        weights = self.read_state(("trainable",))
        self.write_state({name: value + exchange.replica for name, value in weights.items()})


class OwnStart(_Broken):
    """Every replica starts from weights of its own."""

    name = "broken-own-start"
    group = _OwnStart


class _ForgetsMetrics(ReferenceGroup):
    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        kept = {n: value for n, value in state.items() if not n.startswith("metrics/")}
        super().write_state(kept, replica=replica)


class ForgetsMetrics(_Broken):
    """Takes back all state but what the metrics have added up."""

    name = "broken-forgets-metrics"
    group = _ForgetsMetrics


class Careless(Reference):
    """Accepts collectives that it does not have, and leaves a capability out without a word."""

    name = "broken-careless"
    capabilities = {
        **Reference.capabilities,
        "replicated": Capabilities(
            Reference.capabilities["replicated"].has - {Capability.SEND_RECEIVE},
            Reference.capabilities["replicated"].lacks,
        ),
    }

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        return super().resolve_collective(None, device=device, replicas=replicas)


class _NoisyClose(ReferenceGroup):
    def close(self) -> None:
        super().close()
        raise RuntimeError("left in anger")


class NoisyClose(_Broken):
    """Cannot leave the run without an error."""

    name = "broken-noisy-close"
    # no check has a session of its own, which would close the first one
    has_optimizer_groups = False
    capabilities = {**Reference.capabilities, "replicated": REPLICATED_CAPABILITIES}
    group = _NoisyClose


class _DiesInABarrier(ReferenceGroup):
    def barrier(self) -> None:
        if 1 in self.local_replicas:
            os._exit(7)
        super().barrier()


class DiesInABarrier(_Broken):
    """Takes the process down, and so all checks after that."""

    name = "broken-dies-in-a-barrier"
    group = _DiesInABarrier


class IdentityUnderTorch(TorchDDP):
    """torch-ddp, but an all-reduce gives everybody what they gave; DDP still averages gradients."""

    name = "broken-identity-under-torch"

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> TorchReplicaGroup:
        group = super().start(spec, backend_config, context)
        group.communicator.all_reduce = lambda value, op: value.clone()  # type: ignore[method-assign]
        return group


class _UncountedRows(ReferenceGroup):
    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        largest = super().all_reduce_max(values)
        are_counts = min(largest) >= 0
        return [min(value, 1.0) for value in largest] if are_counts else largest


class UncountedRows(_Broken):
    """Replicas count as having one row, however many they have."""

    name = "broken-uncounted-rows"
    group = _UncountedRows


class _SwappedParts(ReferenceGroup):
    def part_sums(self, batch: Batch) -> Iterator[list[list[np.ndarray]]]:
        first, second, third, *others = super().part_sums(batch)
        yield from (first, third, second, *others)


class SwappedParts(_Broken):
    """Two sums in the wrong order."""

    name = "broken-swapped-parts"
    group = _SwappedParts


class _InexactParts(ReferenceGroup):
    def accumulate(
        self, sums: Sequence[np.ndarray], addends: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        return [np.nextafter(each, np.inf) for each in super().accumulate(sums, addends)]


class InexactParts(_Broken):
    """Sums over the parts of a replica that differ in their last bit."""

    name = "broken-inexact-parts"
    group = _InexactParts


class _InexactSums(ReferenceGroup):
    def compute(self, computation: Any, *values: Any, static: Any = None) -> list[Any]:
        if computation is sum_over_replicas:
            ((tree,),) = values
            values = ([[np.nextafter(each, np.inf) for each in tree]],)
        return super().compute(computation, *values, static=static)


class InexactSums(_Broken):
    """Sums that differ in their last bit."""

    name = "broken-inexact-sums"
    group = _InexactSums


class CarelessObjectives(TorchDDP):
    """torch-ddp whose gathers have no gradient, whose updates train all, and whose replicas share state.

    Every replica draws as if it had the first samples.
    """

    name = "broken-careless-objectives"

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> TorchReplicaGroup:
        spec = spec.model_copy(update={"per_replica": ()})
        group = super().start(spec, backend_config, context)
        step = group.trainer.step
        all_gather = step.all_gather
        step.all_gather = lambda x: all_gather(x.detach())  # type: ignore[method-assign]
        set_slice = step.set_slice
        step.set_slice = lambda each: set_slice(replace(each, first=0))  # type: ignore[method-assign]
        return group

    def start_updates(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> dict[str, ReplicaGroup]:
        updates = {
            name: update.model_copy(update={"weights": ("*",)})
            for name, update in spec.updates.items()
        }
        spec = spec.model_copy(update={"updates": updates})
        return super().start_updates(spec, backend_config, context)


BROKEN = (
    IdentityAllReduce,
    SumForMean,
    DroppedSlice,
    SilentBroadcast,
    CountedPlaceholders,
    TrainsToPredict,
    OwnStart,
    ForgetsMetrics,
    Careless,
    NoisyClose,
    DiesInABarrier,
    IdentityUnderTorch,
    UncountedRows,
    SwappedParts,
    InexactParts,
    InexactSums,
    CarelessObjectives,
)


@hookimpl
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers every one of them."""
    for adapter in BROKEN:
        register.add(adapter)
