"""Stages of torch replicas that exchange by Horovod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from isotrain.adapters.horovod import runtime
from isotrain.adapters.horovod.torch_comm import tensor_name, to_sendable
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator, unsupported_collective
from isotrain.plugin import DATA, STAGE, BackendConfig, ProcessContext, ReduceOp, Subgroups


class HorovodPipelineCommunicator(PipelineCommunicator):
    """What goes from one stage to another is a broadcast within a process set of the two."""

    def __init__(self, backend_config: BackendConfig, context: ProcessContext) -> None:
        super().__init__(context)
        mesh = context.device_mesh
        self._same_stage, self._same_replica = mesh.groups(DATA), mesh.groups(STAGE)
        parts = runtime.pipeline_process_sets(mesh)
        self._process_sets = runtime.ProcessSets(hvd, context, backend_config, parts)
        self._under_way: Counter[str] = Counter()

    def _broadcast_first(self, vector: torch.Tensor) -> object:
        return hvd.broadcast_(vector, 0, name="isotrain.first_values")

    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        return self._summed(value, "all", hvd.global_process_set)

    def max_over_all(self, value: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(value, name="isotrain.largest", op=hvd.Max)

    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        return self._sum_within(value, "stages", self._same_replica)

    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if op == "max":
            raise unsupported_collective()
        total = self._sum_within(value, "replicas", self._same_stage)
        return total / self.replicas if op == "mean" else total

    def _sum_within(self, value: torch.Tensor, kind: str, subgroups: Subgroups) -> torch.Tensor:
        process_set = self._process_sets.own(subgroups)
        return value.clone() if process_set is None else self._summed(value, kind, process_set)

    def _summed(self, value: torch.Tensor, kind: str, process_set: Any) -> torch.Tensor:
        name = tensor_name(f"sum_{kind}", value)
        given = to_sendable(value)
        total = hvd.allreduce(given, name=name, op=hvd.Sum, process_set=process_set)
        return total.to(value.dtype)

    def _broadcast_from(self, vector: torch.Tensor, stage: int) -> None:
        process_set = self._process_sets.own(self._same_replica)
        if process_set is None:
            return
        name = f"isotrain.broadcast_from_stage.{stage}"
        hvd.broadcast_(vector, self._first_stage_rank + stage, name=name, process_set=process_set)

    def _isend(self, tensor: torch.Tensor, stage: int) -> Callable[[], None]:
        handle = self._begin(to_sendable(tensor), self._world_rank, self._first_stage_rank + stage)
        return lambda: hvd.synchronize(handle)

    def receive(self, like: torch.Tensor, stage: int) -> torch.Tensor:
        empty = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        source = self._first_stage_rank + stage
        return hvd.synchronize(self._begin(to_sendable(empty), source, self._world_rank)).to(
            like.dtype
        )

    def _begin(self, tensor: torch.Tensor, source: int, destination: int) -> Any:
        """Begins what both processes call, in the same order for tensors of the same shape and type."""
        kind = f"{source}.{destination}.{tuple(tensor.shape)}.{tensor.dtype}"
        self._under_way[kind] += 1
        return hvd.broadcast_async_(
            tensor,
            source,
            name=f"isotrain.send.{kind}.{self._under_way[kind]}",
            process_set=self._process_sets.own([(source, destination)]),
        )

    def wait_all_sent(self) -> None:
        super().wait_all_sent()
        self._under_way.clear()  # names are used again: Horovod remembers those that it knows

    def barrier(self) -> None:
        """One Horovod barrier."""
        hvd.barrier()

    def close(self) -> None:
        """Waits for all processes, then shuts Horovod down."""
        hvd.barrier()
        runtime.stop(hvd)
