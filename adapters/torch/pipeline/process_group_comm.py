"""Stages that exchange by torch's own process groups."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isotrain.adapters.torch.comm.process_group import ProcessGroupCommunicator, start_process_group
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.plugin import DATA, STAGE, BackendConfig, ProcessContext


class ProcessGroupPipelineCommunicator(ProcessGroupCommunicator, PipelineCommunicator):
    """A process group for the same stage of all replicas, and one for the stages of each."""

    def __init__(self, backend_config: BackendConfig, context: ProcessContext) -> None:
        super().__init__(context)
        start_process_group(backend_config, context)
        self._timeout = timedelta(seconds=backend_config.timeout)
        self._peers = self._process_group(context.device_mesh.groups(DATA))
        self._own_stages = self._process_group(context.device_mesh.groups(STAGE))

    def _process_group(self, parts: Sequence[Sequence[int]]) -> Any:
        """This process's group of those that all processes make."""
        made = [dist.new_group(list(part), timeout=self._timeout) for part in parts]
        return next(group for part, group in zip(parts, made, strict=True) if self._place in part)

    def _send_first(self, vector: torch.Tensor) -> object:
        return dist.broadcast(vector, 0)

    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result)
        return result

    def max_over_all(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return result

    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result, group=self._own_stages)
        return result

    def _send_from(self, vector: torch.Tensor, stage: int) -> None:
        dist.broadcast(vector, self._first + stage, group=self._own_stages)

    def _begin_sending(self, tensor: torch.Tensor, stage: int) -> Callable[[], None]:
        work = dist.isend(tensor, self._first + stage)
        kept = [tensor]

        def wait() -> None:
            work.wait()
            kept.clear()

        return wait

    def receive(self, like: torch.Tensor, stage: int) -> torch.Tensor:
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(found, self._first + stage)
        return found

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        """Leaves the process groups; the store, and its port, go with the last of them."""
        self.barrier()
        for name in ("module", "_peers", "_own_stages"):
            self.__dict__.pop(name, None)
        gc.collect()
        dist.destroy_process_group()
