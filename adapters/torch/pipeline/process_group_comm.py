"""Pipeline communicator over torch's process groups."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from isotrain.adapters.torch.comm.process_group import (
    ProcessGroupCommunicator,
    destroy_process_group,
    sends_by_host,
    start_process_group,
)
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.plugin import DATA, RECORDED, BackendConfig, ProcessContext, Subgroups


class ProcessGroupPipelineCommunicator(ProcessGroupCommunicator, PipelineCommunicator):
    """Pipeline communicator with a process group per stage or part, and one per replica."""

    def __init__(self, backend_config: BackendConfig, context: ProcessContext) -> None:
        super().__init__(context)
        self.stands_for_all = backend_config.collective == RECORDED
        start_process_group(backend_config, context)
        self._timeout = timedelta(seconds=backend_config.timeout)
        self._peers = self._new_group(context.device_mesh.groups(DATA))
        self._replica_group = self._new_group(
            context.device_mesh.groups(context.device_mesh.replica_axis)
        )

    def _new_group(self, subgroups: Subgroups) -> Any:
        """Creates the process groups of all subgroups, and returns this process's. Collective."""
        groups = [dist.new_group(list(subgroup), timeout=self._timeout) for subgroup in subgroups]
        return next(
            group
            for subgroup, group in zip(subgroups, groups, strict=True)
            if self._world_rank in subgroup
        )

    def replica_mesh(self, device: torch.device) -> DeviceMesh:
        return DeviceMesh.from_group(self._replica_group, device.type)

    def _broadcast_first(self, vector: torch.Tensor) -> object:
        return dist.broadcast(vector, 0)

    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result)
        return result

    def max_over_all(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return result

    def sum_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result, group=self._replica_group)
        return result

    def max_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self._replica_group)
        return result

    def _broadcast_from(self, vector: torch.Tensor, source: int) -> None:
        dist.broadcast(vector, self.topology.first_rank + source, group=self._replica_group)

    def _isend(self, tensor: torch.Tensor, destination: int) -> Callable[[], None]:
        sent = tensor.cpu() if sends_by_host(tensor.device) else tensor
        work = dist.isend(sent, self.topology.first_rank + destination)
        kept = [sent]

        def wait() -> None:
            work.wait()
            kept.clear()

        return wait

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        device = torch.device("cpu") if sends_by_host(like.device) else like.device
        received = torch.empty_like(like, device=device, memory_format=torch.contiguous_format)
        dist.recv(received, self.topology.first_rank + source)
        return received.to(like.device)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        """Destroys the process groups. Collective."""
        self.barrier()
        for name in ("module", "_peers", "_replica_group"):
            self.__dict__.pop(name, None)
        gc.collect()
        destroy_process_group()
