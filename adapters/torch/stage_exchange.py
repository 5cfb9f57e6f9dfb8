"""How a torch process of a staged run exchanges: along the data axis, and along that of the stages."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isotrain.adapters.torch.exchange import Wait
from isotrain.adapters.torch.process_group import ProcessGroupExchange, start_process_group
from isotrain.adapters.torch.program import Program
from isotrain.plugin import (
    DATA,
    STAGE,
    Parts,
    ProcessContext,
    Setting,
    UnsupportedError,
)

_AXES = 8
"""Of a tensor that one stage tells another of, at most."""
_TYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.bool),
)


class StageExchange(ProcessGroupExchange):
    """Ties a stage to the same stage of other replicas, as which it appears, and to its replica's others.

    Attributes:
        stage: This process's.
        stages: How many there are.
    """

    def __init__(self, setting: Setting, context: ProcessContext) -> None:
        start_process_group(setting, context)
        mesh = context.mesh
        self._place = context.rank
        self.rank = mesh.coordinates(context.rank)[DATA]
        self.replicas = mesh.size(DATA)
        self.stage = mesh.coordinates(context.rank)[STAGE]
        self.stages = mesh.size(STAGE)
        self._timeout = timedelta(seconds=setting.timeout)
        self._peers = self._process_group(mesh.groups(DATA))
        self._own_stages = self._process_group(mesh.groups(STAGE))
        self._first = context.rank - self.stage
        self._sent: dict[Hashable, list[tuple[Any, torch.Tensor]]] = {}

    def _process_group(self, parts: Sequence[Sequence[int]]) -> Any:
        """This process's group of those that all processes make."""
        made = [dist.new_group(list(part), timeout=self._timeout) for part in parts]
        return next(group for part, group in zip(parts, made, strict=True) if self._place in part)

    def attach(self, program: Program) -> None:
        self.module = program.objective.forward
        with torch.no_grad():
            for tensor in (*program.trainable.values(), *program.frozen.values()):
                dist.broadcast(tensor, 0)

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin_mean(self, scalar: torch.Tensor) -> Wait:
        mean = self.all_reduce(scalar, "mean")
        return lambda: mean

    def finish_gradients(self) -> None:
        return

    def over_all(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all stages of all replicas."""
        result = value.clone()
        dist.all_reduce(result)
        return result

    def over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the stages of this replica."""
        result = value.clone()
        dist.all_reduce(result, group=self._own_stages)
        return result

    def from_stage(self, tensor: torch.Tensor, stage: int) -> None:
        """Overwrites a tensor by that of another stage of this replica."""
        dist.broadcast(tensor, self._first + stage, group=self._own_stages)

    def send(self, tensor: torch.Tensor, stage: int, about: Hashable) -> None:
        """Begins to send to another stage of this replica; the tensor is kept until `finish_sending`.

        Args:
            tensor: Goes there.
            stage: The other.
            about: What it is sent for.
        """
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._first + stage)
        self._sent.setdefault(about, []).append((work, tensor))

    def receive(self, like: torch.Tensor, stage: int) -> torch.Tensor:
        """Waits for a tensor like another."""
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(found, self._first + stage)
        return found

    def send_like(self, tensor: torch.Tensor, stage: int, about: Hashable) -> None:
        """Tells another stage the shape and type of what follows."""
        axes = [*tensor.shape, *[0] * (_AXES - tensor.dim())]
        told = [_TYPES.index(tensor.dtype), tensor.dim(), *axes]
        self.send(torch.tensor(told, device=tensor.device), stage, about)

    def receive_like(self, stage: int, device: torch.device) -> torch.Tensor:
        """An empty tensor as what follows is told to be."""
        header = torch.empty(2 + _AXES, dtype=torch.int64, device=device)
        kind, axes, *shape = self.receive(header, stage).tolist()
        return torch.empty(shape[:axes], dtype=_TYPES[kind], device=device)

    def finish_sending(self, about: Hashable) -> None:
        """Returns once what was sent for something has arrived."""
        for work, _ in self._sent.pop(about, []):
            work.wait()

    @property
    def under_way(self) -> Sequence[Hashable]:
        """For what tensors were sent that are kept because they may not have arrived."""
        return list(self._sent)

    def finish_all(self) -> None:
        """Returns once all that was sent has arrived."""
        for about in self.under_way:
            self.finish_sending(about)

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        raise _refused()

    def sum_within(self, value: torch.Tensor, parts: Parts) -> torch.Tensor:
        raise _refused()

    def broadcast_within(self, value: torch.Tensor, parts: Parts) -> torch.Tensor:
        raise _refused()

    def sum_parts(self, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        raise _refused()

    def join_parts(self, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        raise _refused()

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        """Leaves the process groups; the store, and its port, go with the last of them."""
        self.barrier()
        for name in ("module", "_peers", "_own_stages"):
            self.__dict__.pop(name, None)
        gc.collect()
        dist.destroy_process_group()


def _refused() -> UnsupportedError:
    return UnsupportedError("stages exchange over their cuts, and all that others do they cannot.")
