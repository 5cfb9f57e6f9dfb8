"""Pipeline communicator of torch over Horovod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from isotrain.adapters.horovod import runtime
from isotrain.adapters.horovod.torch_comm import tensor_name, to_sendable
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator, unsupported_collective
from isotrain.plugin import DATA, BackendConfig, ProcessContext, ReduceOp, Subgroups

_NAMES = 1 << 16
"""Names of transfers of one shape between two processes, used in turn: more than are in flight at once."""


class HorovodPipelineCommunicator(PipelineCommunicator):
    """Pipeline communicator over Horovod: a transfer is a broadcast within a process set of two ranks."""

    def __init__(self, backend_config: BackendConfig, context: ProcessContext) -> None:
        super().__init__(context)
        mesh = context.device_mesh
        self._stage_groups, self._replica_groups = mesh.groups(DATA), mesh.groups(mesh.replica_axis)
        self._process_sets = runtime.ProcessSets(hvd, context, backend_config)
        self._in_flight: Counter[str] = Counter()

    def _broadcast_first(self, vector: torch.Tensor) -> object:
        return hvd.broadcast_(vector, 0, name="isotrain.first_values")

    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        return self._all_reduce_sum(value, "all", hvd.global_process_set)

    def max_over_all(self, value: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(value, name="isotrain.largest", op=hvd.Max)

    def sum_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        return self._sum_within(value, "stages", self._replica_groups)

    def max_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        process_set = self._process_sets.local(self._replica_groups)
        if process_set is None:
            return value.clone()
        name, sent = tensor_name("max_stages", value), to_sendable(value)
        largest = hvd.allreduce(sent, name=name, op=hvd.Max, process_set=process_set)
        return largest.to(value.dtype)

    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if op == "max":
            raise unsupported_collective()
        total = self._sum_within(value, "replicas", self._stage_groups)
        return total / self.replicas if op == "mean" else total

    def _sum_within(self, value: torch.Tensor, kind: str, subgroups: Subgroups) -> torch.Tensor:
        """All-reduces (sum) a tensor of any shape within this process's subgroup; `kind` names the call."""
        process_set = self._process_sets.local(subgroups)
        return (
            value.clone() if process_set is None else self._all_reduce_sum(value, kind, process_set)
        )

    def _all_reduce_sum(self, value: torch.Tensor, kind: str, process_set: Any) -> torch.Tensor:
        """All-reduces (sum) a tensor of any shape over a process set; returns its dtype."""
        name = tensor_name(f"sum_{kind}", value)
        sent = to_sendable(value)
        total = hvd.allreduce(sent, name=name, op=hvd.Sum, process_set=process_set)
        return total.to(value.dtype)

    def _broadcast_from(self, vector: torch.Tensor, source: int) -> None:
        process_set = self._process_sets.local(self._replica_groups)
        if process_set is None:
            return
        name = f"isotrain.broadcast_in_replica.{source}"
        hvd.broadcast_(
            vector, self.topology.first_rank + source, name=name, process_set=process_set
        )

    def _isend(self, tensor: torch.Tensor, destination: int) -> Callable[[], None]:
        handle = self._broadcast_async(
            to_sendable(tensor), self._world_rank, self.topology.first_rank + destination
        )
        return lambda: hvd.synchronize(handle)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        empty = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        source_rank = self.topology.first_rank + source
        return hvd.synchronize(
            self._broadcast_async(to_sendable(empty), source_rank, self._world_rank)
        ).to(like.dtype)

    def _broadcast_async(self, tensor: torch.Tensor, source: int, destination: int) -> Any:
        """Starts a transfer. Called by both processes, in one order among tensors of one shape and dtype."""
        kind = f"{source}.{destination}.{tuple(tensor.shape)}.{tensor.dtype}"
        self._in_flight[kind] = (self._in_flight[kind] + 1) % _NAMES
        return hvd.broadcast_async_(
            tensor,
            source,
            name=f"isotrain.send.{kind}.{self._in_flight[kind]}",
            process_set=self._process_sets.local([(source, destination)]),
        )

    def wait_all_sent(self) -> None:
        super().wait_all_sent()
        self._in_flight.clear()  # names are reused: Horovod caches the negotiation of known names

    def barrier(self) -> None:
        hvd.barrier()

    def close(self) -> None:
        """Waits for all processes, then shuts Horovod down. Collective."""
        hvd.barrier()
        runtime.stop(hvd)
