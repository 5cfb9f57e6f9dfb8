"""Proxy of a replica group that records which capabilities are used."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.backend.replica import Computation, Replica
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.strategy import Strategy

NEEDS: Mapping[str, Capability] = {
    "synchronous_step": Capability.SYNCHRONOUS_STEP,
    "local_step": Capability.LOCAL_STEP,
    "gradients": Capability.GRADIENTS,
    "reduce_scatter_gradients": Capability.REDUCE_SCATTER_GRADIENTS,
    "apply_gradients": Capability.APPLY_GRADIENTS,
    "read_state": Capability.NAMED_STATE,
    "copy_state": Capability.NAMED_STATE,
    "write_state": Capability.NAMED_STATE,
    "average_parameters": Capability.AVERAGE_PARAMETERS,
    "compute": Capability.COMPUTE,
    "all_reduce": Capability.COMPUTE,
    "all_reduce_async": Capability.COMPUTE,
    "all_gather_async": Capability.COMPUTE,
    "parameter_server_step": Capability.PARAMETER_SERVER_STEP,
    "pipeline_step": Capability.PIPELINE_STEP,
    "gather_stages": Capability.PIPELINE_STEP,
    "start_delayed_updates": Capability.DELAYED_UPDATES,
    "delayed_step": Capability.DELAYED_UPDATES,
    "drain_pipeline": Capability.DELAYED_UPDATES,
    "has_equal_versions": Capability.DELAYED_UPDATES,
    "profile_layers": Capability.PIPELINE_STEP,
    "unshard_weights": Capability.UNSHARD_WEIGHTS,
    "shard_optimizer": Capability.UPDATE_SHARD,
    "update_shard": Capability.UPDATE_SHARD,
    "parameter_server_stats": Capability.PARAMETER_SERVER_STEP,
    "reseed": Capability.PARAMETER_SERVER_STEP,
    "part_sums": Capability.ORDERED_SUMS,
    "evaluation_part_sums": Capability.ORDERED_SUMS,
    "accumulate": Capability.ORDERED_SUMS,
    "add_part_sums": Capability.ORDERED_SUMS,
}
"""Capability that each method of a replica group requires; every backend has the other methods."""

REPLICA_NEEDS: Mapping[str, Capability] = {
    "send_receive": Capability.SEND_RECEIVE,
    "all_reduce_within": Capability.SUBGROUPS,
    "broadcast_within": Capability.SUBGROUPS,
    "reduce_scatter_within": Capability.SUBGROUPS,
    "all_gather_shards_within": Capability.SUBGROUPS,
    "read_weights": Capability.UPDATE_SHARD,
    "write_weights": Capability.UPDATE_SHARD,
}
"""Capability that each method of a replica requires besides `compute`."""

_EXCHANGES = {"all_reduce", "all_gather", "reduce_scatter", "all_gather_shards", *REPLICA_NEEDS}


class RecordingGroup:
    """Proxy of a replica group that adds each used capability to a set."""

    def __init__(self, group: ReplicaGroup, used: set[Capability]) -> None:
        self._group = group
        self._used = used

    # For `isinstance(group, PipelineGroup)` and the like: the proxy has the protocols of its group.
    __class__ = property(lambda self: type(self._group))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._group, name)
        if name in NEEDS:
            self._used.add(NEEDS[name])
        return attribute

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        """Records the capabilities that the computation uses when it runs or is traced. Collective."""
        self._used.add(Capability.COMPUTE)
        return self._group.compute(
            _RecordingComputation(computation, self._used), *values, static=static
        )


@dataclass(frozen=True)
class _RecordingComputation:
    """Computation on a recording replica; equal for equal computations, so that none is traced twice."""

    computation: Computation
    used: set[Capability] = field(compare=False)

    def __call__(self, replica: Replica, *values: Any, **options: Any) -> Any:
        return self.computation(_RecordingReplica(replica, self.used), *values, **options)


class _RecordingReplica:
    def __init__(self, replica: Replica, used: set[Capability]) -> None:
        self._replica = replica
        self._used = used

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._replica, name)
        if name not in _EXCHANGES:
            return attribute
        if name in REPLICA_NEEDS:
            self._used.add(REPLICA_NEEDS[name])

        def exchange(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if "bfloat16" in str(getattr(tensor, "dtype", "")):
                self._used.add(Capability.BFLOAT16_COLLECTIVES)
            return attribute(tensor, *arguments, **options)

        return exchange


@contextlib.contextmanager
def recording_capabilities(strategy: Strategy, used: set[Capability]) -> Iterator[None]:
    """Context that adds the capabilities that the strategy uses of its group to `used`.

    Uses are recorded and not refused: a refusal on some replicas would leave the others waiting for them.
    """
    step, finished = strategy.step, strategy.finished

    def recording(group: ReplicaGroup) -> ReplicaGroup:
        return cast("ReplicaGroup", RecordingGroup(group, used))

    vars(strategy).update(
        step=lambda group, batch, rate: step(recording(group), batch, rate),
        finished=lambda group: finished(recording(group)),
    )
    try:
        yield
    finally:
        del strategy.__dict__["step"], strategy.__dict__["finished"]
